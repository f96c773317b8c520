"""Observability of a process: events for hooks, logs and metrics. Independent of server, broker and client."""
