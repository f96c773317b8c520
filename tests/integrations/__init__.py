"""Loaders of other libraries: those that attach in place of loading, and those that are unchanged."""
