"""Credentials of the peer of a Unix socket, and their comparison with this user."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

_UCRED = struct.Struct("iI4x")
#: asm-generic/socket.h, from Linux 6.5 on.
_SO_PEERPIDFD = 77


class Peer(NamedTuple):
    """The peer, as reported by the kernel. ``pid`` is 0 in a pid namespace that this process cannot see."""

    pid: int
    uid: int


_NOBODY = Peer(0, 2**32 - 1)


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that called connect(2), or listen(2) on the server's side: SO_PEERCRED, see unix(7)."""
    return Peer(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def request_credentials(sock: socket.socket) -> None:
    """Make the kernel attach the sender to later bytes, for :func:`answerer_of`. For a connected socket: another one would be
    bound to a name.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def answerer_of(sock: socket.socket) -> Peer:
    """Return the sender of the first bytes waiting in a socket, once, after :func:`request_credentials`.

    It may differ from the process that listened, for example with a service manager's socket. Bytes sent before that call
    have uid 65534 and pid 0.

    :raises BlockingIOError: if no bytes are waiting.
    """
    # Without a buffer for descriptors none are received; the bytes stay in the socket.
    _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_UCRED.size), socket.MSG_PEEK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return Peer(*_UCRED.unpack(content[: _UCRED.size]))
    return _NOBODY  # the end of the stream, or no such socket


def shares_pid_namespace(sock: socket.socket) -> bool:
    """Return True if the process that called connect(2) is alive, and in this process's own pid namespace.

    A process in a namespace below has a pid here too; one in another container has none, and is reported as 0. Before Linux
    6.5, a process that got the pid of a just ended one may be mistaken for that.
    """
    pid = peer_of(sock).pid
    if not pid:
        return False
    try:
        # /proc may be that of another pid namespace, with other numbers.
        if os.readlink("/proc/self") != str(os.getpid()):
            return False
        pidfd = _pidfd_of(sock, pid)
        try:
            same = os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
            # It is still alive, so no other process has had its pid.
            return same and not select.select([pidfd], [], [], 0)[0]
        finally:
            os.close(pidfd)
    except OSError:  # it has ended, or does not permit the access
        return False


def _pidfd_of(sock: socket.socket, pid: int) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(pid)


def is_own(uid: int) -> bool:
    """Return True if a uid reported by the kernel, of a process or a file, is this process's user.

    In a user namespace the kernel reports each user without a uid there as the overflow uid, 65534: it matches no user, not
    even a process with that uid.
    """
    return uid == os.geteuid() and not _may_be_anyone(uid)


def is_own_or_root(uid: int) -> bool:
    """Return True if a uid is this process's user or root, whom every process must trust."""
    return uid == 0 or is_own(uid)


def foreign_owner(path: str) -> int | None:
    """Return the owner of a file, if it is neither this user nor root."""
    try:
        uid = os.lstat(path).st_uid
    except OSError:
        return None
    return None if is_own_or_root(uid) else uid


def named(uid: int) -> str:
    """Return the uid in words, for an error."""
    return f"uid {uid}{', as the kernel calls every user without a uid here,' if _may_be_anyone(uid) else ''}"


def _may_be_anyone(uid: int) -> bool:
    """Return True if a uid is the overflow uid, in a user namespace that does not have all uids; see user_namespaces(7)."""
    overflow, whole = 65534, False
    with suppress(OSError):
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            overflow = int(file.read())
        if uid == overflow:
            with open("/proc/self/uid_map", encoding="ascii") as file:
                whole = file.read().split() == ["0", "0", "4294967295"]
    return uid == overflow and not whole
