"""A socket's directory, and files next to the socket: in a sticky directory one is used only if this user made it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.peers import is_own, is_own_or_root, named


def open_own(path: str, flags: int, create: bool = True) -> int:
    """Open a file of this user, and make it, with mode 0600, where there is none. The descriptor is the caller's to close.

    :param create: False to open a file that exists.

    :raises ConfigurationError: if the file is another user's, or another name of some other file, to which one who
        may not write to it would have this process do so.
    :raises OSError: if it cannot be opened, as a link cannot.
    """
    try:
        # Opening another user's pipe would block.
        fd = os.open(path, flags | (os.O_CREAT if create else 0) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        # With fs.protected_regular, the kernel keeps even root from opening another user's file, and says only EACCES.
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


def why_not_trusted(status: os.stat_result) -> str:
    """Return why a file of that fstat(2) may be another user's work, as the rest of a sentence; empty if it cannot be.

    It must belong to this user or to root, whose servers clients accept too, and no other user may have permission to write.
    """
    if not is_own_or_root(status.st_uid):
        return f"belongs to {named(status.st_uid)}, but this process has uid {os.geteuid()}"
    mode = stat.S_IMODE(status.st_mode)
    return f"has mode {mode:04o}, so other users may have written it" if mode & 0o022 else ""


def _make_private(directory: str) -> None:
    """Make a directory and those above it, all with mode 0700: a user who can write to one can replace its files."""
    if os.path.isdir(directory):
        return
    _make_private(os.path.dirname(directory))
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)
