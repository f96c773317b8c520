"""``shared-rpc top``: a live view of a server."""
