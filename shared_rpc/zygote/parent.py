"""A process that must not outlive the one that it works for, whatever it is stuck in."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL when the thread that is the parent of this process ends; see prctl(2).

    :param parent: the process id of the parent; if it has ended meanwhile, so does this process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
