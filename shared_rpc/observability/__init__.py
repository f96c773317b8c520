"""What a process tells of itself: events for hooks, logs and metrics. It knows neither server nor broker nor client."""
