"""The server: its state, and request handlers on an event loop."""
