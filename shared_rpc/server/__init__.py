"""The server: an event loop around its state, and the handlers of requests."""
