"""Endpoints and roles: what a user declares, and what each role makes of it."""
