"""The socket's place in the file system: its permitted users, and a server that already has it.

The directory is private (0700), or sticky as ``/tmp`` is: there others can make files, and cannot take away ours. What they
put in the way is refused and named, and both sides of a connection ask the kernel who the other is. The socket is 0600. A live
socket is never taken away; a dead one is replaced, under a lock, so that two servers that start at once cannot replace each
other's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.own_files import check_directory, open_own
from shared_rpc.protocol.peers import Peer, is_own, named, peer_of
from shared_rpc.settings import checked_path

_BACKLOG = 4096


def bind_socket(path: str) -> socket.socket:
    """Return a listening, non-blocking socket at ``path``.

    :raises ConfigurationError: if a server lives there (its pid is named), if the path or its directory belongs to
        another user or is open to others, or if it is no socket; and for a path that is not UTF-8.
    """
    checked_path(path)
    check_directory(os.path.dirname(path))
    try:
        with _locked(f"{path}.lock"):
            _make_way(path)
            try:
                return _listen(path)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                _make_way(path)  # a process that does not use the lock was faster
                return _listen(path)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {path}: {error}") from error


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # On Linux the file gets the mode of the socket's inode: it is never open to other users.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def remove_socket(path: str, inode: int) -> None:
    """Remove the file of a socket that no longer listens, if it is still the one with that inode."""
    try:
        with _locked(f"{path}.lock"):
            if os.lstat(path).st_ino == inode:
                os.unlink(path)
    except (OSError, ConfigurationError):
        return  # removed already, perhaps with its directory


@contextmanager
def _locked(path: str) -> Iterator[None]:
    fd = open_own(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _named(peer: Peer) -> str:
    if not is_own(peer.uid):
        return f"by pid {peer.pid} of {named(peer.uid)}"
    return f"by pid {peer.pid}" if peer.pid != os.getpid() else f"by another provider of this process (pid {peer.pid})"


def _make_way(path: str) -> None:
    """Remove a dead socket; refuse anything else."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    ours, is_socket = is_own(status.st_uid), stat.S_ISSOCK(status.st_mode)
    if ours and not is_socket:
        raise ConfigurationError(f"{path} exists and is no socket: remove the file, or choose another base_path")
    owner = _who_listens(path) if is_socket else ""
    if not ours:
        served = f", and is served {owner}" if owner else ""
        raise ConfigurationError(
            f"{path} belongs to {named(status.st_uid)}, not {os.geteuid()}{served}: have that user remove it, or choose "
            f"another base_path (SHARED_TENSOR_BASE_PATH)"
        )
    if owner:
        raise ConfigurationError(f"{path} is served {owner}: stop that server, or choose another base_path")
    os.unlink(path)


def _who_listens(path: str) -> str:
    """Return the process that serves the socket, without sending anything; empty for none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        code = probe.connect_ex(path)
        if code in (errno.ECONNREFUSED, errno.ENOENT):
            return ""
        if code == errno.EAGAIN:
            return "by a server with a full backlog"
        return _named(peer_of(probe)) if code == 0 else f"by a server that cannot be reached ({os.strerror(code)})"
