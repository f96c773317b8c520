"""Forced ends of this process, and the processes started by :mod:`multiprocessing`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def end_now(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown, which could wait without limit.

    It is also the only way to set the exit code in an exit callback. No exit callback runs.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream is None or closed, or a pipe without a reader
            stream.flush()
    end_children()
    os._exit(code)


def end_children() -> None:
    """Send SIGTERM to the processes that :mod:`multiprocessing` started here: pools wait for work without limit, and no other
    process has their ids.
    """
    for child in multiprocessing.active_children():
        with suppress(OSError, ValueError):  # the wait has ended, and another thread has written
            child.terminate()


def end_within(seconds: float, code: int, why: str = "") -> None:
    """End the process after ``seconds`` if it is still running. The interpreter's exit does not wait for this timer.

    :param why: the reason for the end. If given, the thread or callback that delays the end is named on standard error.
    """

    def end() -> None:
        if why and sys.__stderr__ is not None:
            with suppress(OSError):  # not by sys.stderr: a hanging thread may hold its lock
                os.write(
                    2, f"shared_rpc: {why}, but {_hindrance()} after {seconds:g} s: exiting anyway\n".encode(errors="replace")
                )
        end_children()
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _hindrance() -> str:
    """Name the threads or callbacks that delay the interpreter's exit: threads first, then exit callbacks."""
    main, own = threading.main_thread(), threading.current_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in (main, own)]
    if not names:
        return "exit callbacks (atexit) have not returned"
    return f"thread {', '.join(map(repr, names))} (not daemon) still runs"


def is_child() -> bool:
    """Return True if :mod:`multiprocessing` started this process, in any way: it has the role's environment of its parent.

    A spawned child runs the main module before its parent process is set. The fork server has none, imports the modules to
    preload (from Python 3.14 on the main module, by default), and ends like a main program, after its parent.
    """
    if multiprocessing.parent_process() is not None or getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    return any("from multiprocessing.forkserver import main" in word for word in sys.orig_argv)
