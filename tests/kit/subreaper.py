"""Forks whose parent is an ancestor of the forking process."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from shared_rpc.zygote.process import fork, is_readable

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def fork_for_subreaper() -> int:
    """Fork a process that is a child of the nearest ancestor that is a subreaper; without one, of the system's first process.

    This gives a program a child that it can wait for, whose exit status reaches it whatever happens to the zygote, and that can
    be made to end with it; see PR_SET_CHILD_SUBREAPER of prctl(2). A process between the two ends at once. (clone(2) with
    CLONE_PARENT would need none, but bypasses the fork hooks of Python and of native libraries.)

    Signals are blocked during the fork, and in the new process until it unblocks them.

    :returns: its process id; 0 in the process itself.
    :raises OSError: if there is no room for another process.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    reading, writing = os.pipe()
    born = False
    try:
        between = fork()
        if between == 0:
            try:
                born = _fork_between(writing)
            finally:
                if not born:
                    os._exit(1)
            return 0
        os.close(writing)
        writing = -1
        report = os.read(reading, 64)
        os.waitpid(between, 0)  # from here on, the parent of the new process is final
    finally:
        if not born:
            os.close(reading)
            if writing >= 0:
                os.close(writing)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    pid, _, error = report.partition(b" ")
    if not pid.isdigit():
        raise OSError(int(error) if error.isdigit() else 0, os.strerror(int(error)) if error.isdigit() else "the fork ended")
    return int(pid)


def _fork_between(writing: int) -> bool:
    """Fork again and end; return True in the new process, once its parent is final."""
    between = os.pidfd_open(os.getpid())
    try:
        pid = fork()
    except (OSError, MemoryError) as error:
        os.write(writing, f"- {getattr(error, 'errno', errno.ENOMEM)}".encode())
        return False
    if pid:
        os.write(writing, str(pid).encode())
        return os._exit(0)
    # The parent is signalled at the end of the process, whose children have their new parent before that.
    return is_readable(between)


@contextmanager
def adopting() -> Iterator[None]:
    """Make this process adopt descendants whose parent ends within the block; see prctl(2).

    Keep the block short, unless the process is a subreaper already: a process that adopts another must wait for its end.
    """
    prctl, already = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(already), 0, 0, 0)
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot become a subreaper (PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, already.value, 0, 0, 0)
