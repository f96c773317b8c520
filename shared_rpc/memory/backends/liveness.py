"""Export descriptors: descriptors that represent memory of a process, and are counted by the kernel.

Memory of CUDA's older mechanisms is freed by the process that made it, which must not do so while another process uses it. An
export descriptor is sent in place of the memory: a sealed memfd that describes how to open it. Two locks report each side's
liveness to the other, for any end of a process, including SIGKILL:

- *Is it in use?* The open file description that is sent holds flock(2) exclusively; duplicates, and copies in other
  processes or in SCM_RIGHTS messages in transit, are the same description. The maker waits for that lock over a
  description of its own, and gets it when the last copy is closed.
- *Is its maker alive?* The maker's own description holds a lock of fcntl(2) (F_OFD_SETLK) that others can query.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
from collections.abc import Callable

from shared_rpc.errors import CapabilityError
from shared_rpc.forks import after_fork

_log = logging.getLogger("shared_rpc")

#: An export descriptor never changes.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_MAGIC = b"shared-rpc export descriptor 1\n"
#: Bytes. An export descriptor names memory, and does not contain it.
_LIMIT = 4096

#: struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")

#: The maker's own file descriptions, closed in a forked child.
_kept: set[int] = set()


# Locks of fcntl(2) on bytes of a file, by default all: between open file descriptions, until the last copy of one is closed.


def lock(fd: int, at: int = 0, length: int = 0, kind: int = fcntl.F_WRLCK) -> bool:
    """Lock bytes, or unlock them; return False if another description has them locked."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, at, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(fd: int, at: int = 0, length: int = 0) -> bool:
    """Return True if another description has one of the bytes locked."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, length, 0))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def issue(content: bytes, on_end: Callable[[], None]) -> int:
    """Return a new export descriptor, which the caller owns.

    ``on_end`` runs once, in a thread, when no copy of the descriptor is left in any process; never in a forked child.

    :raises CapabilityError: if the system refuses a memfd, a second description of it or a thread.
    """
    own = -1
    try:
        fd = os.memfd_create("shared-rpc-export", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, _MAGIC + content)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            fcntl.flock(fd, fcntl.LOCK_EX)
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            _kept.add(own)
            lock(own, kind=fcntl.F_RDLCK)
            # A thread for each: flock is the only call that waits for it, and a waiting thread uses no processor time.
            threading.Thread(target=_wait, args=(own, on_end), name="shared-rpc-export", daemon=True).start()
        except BaseException:
            os.close(fd)
            if own >= 0:
                _kept.discard(own)
                os.close(own)
            raise
    except (OSError, RuntimeError) as error:
        raise CapabilityError(f"pid {os.getpid()} cannot make an export descriptor (memfd, /proc, thread): {error}") from error
    return fd


def _wait(own: int, on_end: Callable[[], None]) -> None:
    try:
        fcntl.flock(own, fcntl.LOCK_EX)
        on_end()
    except Exception:
        _log.exception("cannot release exported memory that is not used any more")
    finally:
        _kept.discard(own)
        os.close(own)


def read(fd: int) -> bytes:
    """Return the contents of an export descriptor. The descriptor is borrowed.

    :raises CapabilityError: if it is not an export descriptor.
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        text = os.pread(fd, _LIMIT, 0) if sealed else b""
    except OSError:
        text = b""
    if not text.startswith(_MAGIC):
        raise CapabilityError("the descriptor is no export descriptor: use one release on both sides")
    return text.removeprefix(_MAGIC)


def maker_lives(fd: int) -> bool:
    """Return True if the process that issued the export descriptor is alive."""
    return is_locked(fd)


@after_fork
def _close_kept() -> None:
    # With a child's copy, the maker would seem to live as long as the child.
    for own in _kept:
        os.close(own)
    _kept.clear()
