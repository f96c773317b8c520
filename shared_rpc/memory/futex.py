"""Waiting for a word of shared memory to change, and ordering the writes around it: futex(2)."""

from __future__ import annotations

import ctypes
import platform

from shared_rpc.errors import CapabilityError

#: The number of the system call, by machine (asm/unistd.h).
_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _PRIVATE = 0, 1, 128
_ALL = 0x7FFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


#: A word of this process without waiters.
_unused_word = ctypes.c_uint32()
_UNUSED = ctypes.addressof(_unused_word)


def supported() -> None:
    """Check that futex(2) is supported on this machine.

    :raises CapabilityError: if it is not.
    """
    if _NUMBER is None:
        raise CapabilityError(f"revisions need futex(2), whose number on {platform.machine()!r} machines is unknown here")


def wait(address: int, word: int, seconds: float) -> None:
    """Wait until the 32-bit word at ``address`` is not ``word``, for ``seconds`` at most; spurious returns are possible.

    Other threads continue.
    """
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _call(address, _WAIT, word & 0xFFFFFFFF, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wake all threads that wait for the word, in any process. A full memory barrier, like :func:`fence`."""
    _call(address, _WAKE, _ALL, None)


def fence() -> None:
    """Order this thread's reads and writes before its later ones.

    Waking must see new waiters, so the kernel begins it with a full barrier on every machine (``hb_waiters_pending`` in
    kernel/futex). Neither Python nor ctypes has another one.
    """
    _call(_UNUSED, _WAKE | _PRIVATE, 1, None)


def _call(address: int, operation: int, value: int, limit: object) -> None:
    _syscall(_NUMBER or 0, address, operation, value, limit, None, 0)
