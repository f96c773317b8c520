"""Running endpoints: what a process needs that does it, a worker or a server without workers."""
