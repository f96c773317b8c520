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
from contextlib import contextmanager, suppress

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.own_files import open_own
from shared_rpc.protocol.peers import Peer, is_own, is_own_or_root, named, peer_of
from shared_rpc.settings import checked_path

__all__ = ["bind_socket", "check_directory", "remove_socket", "why_not_there"]

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


def check_directory(directory: str) -> None:
    """Make it, private, where it is not there.

    :raises ConfigurationError: if it belongs to another user, or others can write to it, and it is not sticky.
    """
    try:
        _make_private(directory)
        status = os.lstat(directory)
    except OSError as error:
        raise ConfigurationError(f"cannot use the socket directory {directory}: {error}") from error
    reason = why_not_there(status)
    if reason:
        open_to_others = stat.S_ISDIR(status.st_mode) and is_own(status.st_uid)
        raise ConfigurationError(
            f"the socket directory {directory} {reason}: {'chmod 700, or ' if open_to_others else ''}"
            f"set SHARED_TENSOR_BASE_PATH, or base_path, to a path in a directory of your own"
        )


def why_not_there(status: os.stat_result) -> str:
    """Return why no socket may lie in a directory of that lstat(2), as the rest of a sentence; empty if it may.

    It may if the directory is this user's, and no other user can write to it; and where it is sticky, and this user's or
    root's, so that only these two can remove another user's files.
    """
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if mode & stat.S_ISVTX and is_own_or_root(status.st_uid):
        return ""
    if not is_own(status.st_uid):
        return f"belongs to {named(status.st_uid)}, not {os.geteuid()}"
    return f"has mode {mode:04o}, so other users can write to it" if mode & 0o022 else ""


def _make_private(directory: str) -> None:
    """Make a directory and those above it, all with mode 0700: a user who can write to one can replace its files."""
    if os.path.isdir(directory):
        return
    _make_private(os.path.dirname(directory))
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)


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
