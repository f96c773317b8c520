"""Crashes, strangers, callers that give up, memory that must come back."""
