"""The socket in the file system: permissions, and detection of a running server.

The directory is private (0700), or sticky like ``/tmp``: there others can create files, but not remove ours. A foreign file at
the path is refused and named, and both sides of a connection ask the kernel for the peer's credentials. The socket is 0600. A
live socket is never removed; a dead one is replaced, under a lock, so that two servers starting at once cannot replace each
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

    :raises ConfigurationError: if a server is listening there (named by its pid), if the path or its directory belongs to
        another user or is open to others, if it is not a socket, or if it is not UTF-8.
    """
    checked_path(path)
    check_directory(os.path.dirname(path))
    try:
        with _locked(f"{path}.lock"):
            _remove_dead_socket(path)
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


def _remove_dead_socket(path: str) -> None:
    """Remove a dead socket; refuse anything else."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    ours, is_socket = is_own(status.st_uid), stat.S_ISSOCK(status.st_mode)
    if ours and not is_socket:
        raise ConfigurationError(f"{path} exists and is no socket: remove the file, or choose another base_path")
    owner = _listening_process(path) if is_socket else ""
    if not ours:
        served = f", and is served {owner}" if owner else ""
        raise ConfigurationError(
            f"{path} belongs to {named(status.st_uid)}, not {os.geteuid()}{served}: have that user remove it, or choose "
            f"another base_path (SHARED_TENSOR_BASE_PATH)"
        )
    if owner:
        raise ConfigurationError(f"{path} is served {owner}: stop that server, or choose another base_path")
    os.unlink(path)


def _listening_process(path: str) -> str:
    """Return the process that serves the socket, without sending anything; empty if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        code = probe.connect_ex(path)
        if code in (errno.ECONNREFUSED, errno.ENOENT):
            return ""
        return _named(peer_of(probe)) if code == 0 else f"by a server that cannot be reached ({os.strerror(code)})"
