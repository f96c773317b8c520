"""Credentials of the other end of a Unix socket, and which of them are this user's."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

__all__ = ["Peer", "is_own", "is_own_or_root", "named", "peer_of"]

_UCRED = struct.Struct("iII")


class Peer(NamedTuple):
    """The other side, as the kernel vouches for it. ``pid`` is 0 where it lives in a pid namespace unknown here."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that called connect(2), or listen(2) on the server's side: SO_PEERCRED, see unix(7)."""
    return Peer(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def is_own(uid: int) -> bool:
    """Return whether a uid that the kernel reported, of a process or a file, is this process's user.

    In a user namespace the kernel reports each user that has no uid there as the overflow uid, 65534: that is nobody's, also if
    this process has it.
    """
    return uid == os.geteuid() and not _may_be_anyone(uid)


def is_own_or_root(uid: int) -> bool:
    """Return whether a uid is this process's user or root, whom every process must trust."""
    return uid == 0 or is_own(uid)


def named(uid: int) -> str:
    """Return the uid in words, for an error."""
    return f"uid {uid}{', as the kernel calls every user without a uid here,' if _may_be_anyone(uid) else ''}"


def _may_be_anyone(uid: int) -> bool:
    """Return whether a uid is the overflow uid, in a user namespace that does not have all uids; see user_namespaces(7)."""
    overflow, whole = 65534, False
    with suppress(OSError):
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            overflow = int(file.read())
        if uid == overflow:
            with open("/proc/self/uid_map", encoding="ascii") as file:
                whole = file.read().split() == ["0", "0", "4294967295"]
    return uid == overflow and not whole
