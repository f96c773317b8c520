"""Files beside a socket. In a sticky directory everybody may make them, so one is used only if this user made it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.peers import is_own, named

__all__ = ["open_own"]


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
