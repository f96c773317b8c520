"""The clients: every operation once, as a generator, and the shells that drive it."""

from shared_rpc.client.aio import AsyncClient
from shared_rpc.client.sync import Client

__all__ = ["AsyncClient", "Client"]
