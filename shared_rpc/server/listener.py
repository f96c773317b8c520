"""The socket's place in the file system: who may use it, and whether a server already does.

The directory is private (0700) and the socket 0600. A live socket is never taken away; a dead one is replaced, under
a lock, so that two servers that start at once cannot replace each other's.
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
from shared_rpc.peers import peer_of

__all__ = ["bind_socket", "check_directory", "remove_socket"]

_BACKLOG = 4096


def bind_socket(path: str) -> socket.socket:
    """A listening, non-blocking socket at ``path``.

    :raises ConfigurationError: if a server lives there (its pid is named), if the path or its directory belongs to
        somebody else or is open to others, or if it is no socket.
    """
    check_directory(os.path.dirname(path))
    try:
        with _locked(f"{path}.lock"):
            _make_way(path)
            return _listen(path)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {path}: {error}") from error


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # On Linux the file takes the mode of the socket's own inode, so it is never open to others.
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
    except OSError:
        return  # gone already, with its directory perhaps


def check_directory(directory: str) -> None:
    """Make it, private, where it is not there.

    :raises ConfigurationError: if it belongs to somebody else, or others can write to it.
    """
    try:
        _make_private(directory)
        status = os.lstat(directory)
    except OSError as error:
        raise ConfigurationError(f"cannot use the socket directory {directory}: {error}") from error
    advice = "set SHARED_TENSOR_BASE_PATH, or base_path, to a path in a directory of your own"
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"the socket directory {directory} is no directory: {advice}")
    if status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"the socket directory {directory} belongs to uid {status.st_uid}, not {os.geteuid()}: {advice}"
        )
    if status.st_mode & 0o022:
        raise ConfigurationError(
            f"the socket directory {directory} has mode {stat.S_IMODE(status.st_mode):04o}, "
            f"others can write to it: chmod 700, or {advice}"
        )


def _make_private(directory: str) -> None:
    """``os.makedirs`` with mode 0700 for the directories above too: who can write to one can replace what is in it."""
    if os.path.isdir(directory):
        return
    _make_private(os.path.dirname(directory))
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _named(pid: int) -> str:
    return f"by pid {pid}" if pid != os.getpid() else f"by another provider of this process (pid {pid})"


def _make_way(path: str) -> None:
    """Remove a dead socket; refuse anything else."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if status.st_uid != os.geteuid():
        raise ConfigurationError(f"{path} belongs to uid {status.st_uid}, not {os.geteuid()}: choose another base_path")
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigurationError(f"{path} is there and is no socket: remove it, or choose another base_path")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        code = probe.connect_ex(path)
        if code in (errno.ECONNREFUSED, errno.ENOENT):
            os.unlink(path)
            return
        owner = _named(peer_of(probe).pid) if code == 0 else "by a server with a full backlog"
    finally:
        probe.close()
    raise ConfigurationError(f"{path} is served {owner}: stop that server first, or choose another base_path")
