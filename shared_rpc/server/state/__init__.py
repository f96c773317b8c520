"""State of a server: objects, calls in flight, leases. No I/O, no clock, no threads, no torch."""
