"""Execution of endpoints, in a worker or in a server without workers."""
