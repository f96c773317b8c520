"""Connections of clients that break."""

from __future__ import annotations

import socket

from shared_rpc import AsyncClient, Client

__all__ = ["break_off"]


def break_off(client: Client | AsyncClient) -> None:
    """Have the connection of a client break: neither side has closed it on purpose."""
    link = client._link
    assert link is not None, "the client is not connected"
    link._socket.sock.shutdown(socket.SHUT_RDWR)
