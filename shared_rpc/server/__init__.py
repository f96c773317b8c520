"""The server: anyio around the store."""

from shared_rpc.server.server import Server

__all__ = ["Server"]
