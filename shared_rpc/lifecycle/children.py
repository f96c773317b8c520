"""Processes that multiprocessing starts."""

from __future__ import annotations

import multiprocessing
import sys


def is_child() -> bool:
    """Return whether :mod:`multiprocessing` started this process, whichever way: it has the role's environment of its parent.

    A child that was spawned runs the main module before it knows of its parent. The fork server has none, imports what it is
    told to preload (from Python 3.14 on the main module, by default), and ends as a main program does, after its parent.
    """
    if multiprocessing.parent_process() is not None or getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    return any("from multiprocessing.forkserver import main" in word for word in sys.orig_argv)
