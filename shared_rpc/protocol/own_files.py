"""A socket's directory, and files next to the socket: in a sticky directory only files of this user are used."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.peers import is_own, is_own_or_root, named


def open_own(path: str, flags: int) -> int:
    """Open a file of this user, creating it with mode 0600 if necessary. The caller must close the descriptor.

    :raises ConfigurationError: if the file is another user's, or a hard link to some other file, by which a user without
        write permission could make this process write there.
    :raises OSError: if it cannot be opened, for example because it is a symbolic link.
    """
    try:
        # Opening another user's pipe would block.
        fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        # With fs.protected_regular, the kernel keeps even root from opening another user's file, with a mere EACCES.
        with suppress(OSError):  # no such file: the directory is full or not accessible
            _check_owner(path, os.lstat(path))
        raise
    try:
        status = os.fstat(fd)
        _check_owner(path, status)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise ConfigurationError(
                f"{path} is a pipe or a device, or has {status.st_nlink} names, and not a file of its own. Remove it, or "
                f"choose another base_path (SHARED_TENSOR_BASE_PATH)"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_owner(path: str, status: os.stat_result) -> None:
    if not is_own(status.st_uid):
        raise ConfigurationError(
            f"{path} belongs to {named(status.st_uid)}, not {os.geteuid()}: have that user remove it, or choose another "
            f"base_path (SHARED_TENSOR_BASE_PATH)"
        )


def check_directory(directory: str) -> None:
    """Create the directory as a private one if it does not exist.

    :raises ConfigurationError: if it belongs to another user, or others can write to it, and it is not sticky.
    """
    try:
        _make_private(directory)
        status = os.lstat(directory)
    except OSError as error:
        raise ConfigurationError(f"cannot use the socket directory {directory}: {error}") from error
    reason = directory_problem(status)
    if reason:
        open_to_others = stat.S_ISDIR(status.st_mode) and is_own(status.st_uid)
        raise ConfigurationError(
            f"the socket directory {directory} {reason}: {'chmod 700, or ' if open_to_others else ''}"
            f"set SHARED_TENSOR_BASE_PATH, or base_path, to a path in a directory of your own"
        )


def directory_problem(status: os.stat_result) -> str:
    """Return the reason why a directory with that lstat(2) must not have a socket, as the rest of a sentence; empty if it may.

    It may if the directory is this user's, and no other user can write to it; or if it is sticky, and this user's or root's, so
    that only these two can remove another user's files.
    """
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if mode & stat.S_ISVTX and is_own_or_root(status.st_uid):
        return ""
    if not is_own(status.st_uid):
        return f"belongs to {named(status.st_uid)}, not {os.geteuid()}"
    return f"has mode {mode:04o}, so other users can write to it" if mode & 0o022 else ""


def file_problem(status: os.stat_result) -> str:
    """Return the reason why a file with that fstat(2) may be another user's work, as the rest of a sentence; empty if not.

    It must belong to this user or to root, whose servers clients accept too, and be writable by no other user.
    """
    if not is_own_or_root(status.st_uid):
        return f"belongs to {named(status.st_uid)}, but this process has uid {os.geteuid()}"
    mode = stat.S_IMODE(status.st_mode)
    return f"has mode {mode:04o}, so other users may have written it" if mode & 0o022 else ""


def _make_private(directory: str) -> None:
    """Create a directory and its parents, all with mode 0700: a user who can write to one can replace its files."""
    if os.path.isdir(directory):
        return
    _make_private(os.path.dirname(directory))
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)
