"""Endpoints and roles: a user's declarations, and their execution in each role."""
