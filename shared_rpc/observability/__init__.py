"""Observability of a process: events for hooks, logs and metrics. It knows neither server nor broker nor client."""
