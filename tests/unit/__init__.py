"""Parts by themselves: no server, no process."""
