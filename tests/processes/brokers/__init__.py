"""The broker: its workers, its restarts, its service manager."""
