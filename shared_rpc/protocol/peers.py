"""Credentials of the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

__all__ = ["Peer", "peer_of"]

_UCRED = struct.Struct("iII")


class Peer(NamedTuple):
    """The other side, as the kernel vouches for it. ``pid`` is 0 where it lives in a pid namespace unknown here."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that called connect(2), or listen(2) on the server's side: SO_PEERCRED, see unix(7)."""
    return Peer(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))
