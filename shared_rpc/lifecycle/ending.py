"""The end of this process where it does not come by itself, and the processes that :mod:`multiprocessing` starts."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def end_now(code: int) -> NoReturn:
    """End the process without the interpreter's own end, which could wait without limit.

    From an exit callback there is no other way to set the exit code either. No exit callback runs.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream is None or closed, or a pipe without a reader
            stream.flush()
    end_children()
    os._exit(code)


def end_children() -> None:
    """Ask the processes that :mod:`multiprocessing` started here to end: pools wait for work without limit, and no other
    process knows of them.
    """
    for child in multiprocessing.active_children():
        with suppress(OSError, ValueError):  # the wait has ended, and another thread has written
            child.terminate()


def end_within(seconds: float, code: int, why: str = "") -> None:
    """End the process by then, if it has not ended by itself. The interpreter does not wait for that.

    :param why: why the process ends. If given, standard error names the thread or callback that has kept it.
    """

    def end() -> None:
        if why and sys.__stderr__ is not None:
            with suppress(OSError):  # not by sys.stderr: a thread that hangs may have its lock
                os.write(
                    2, f"shared_rpc: {why}, but {_hindrance()} after {seconds:g} s: ends without\n".encode(errors="replace")
                )
        end_children()
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _hindrance() -> str:
    """Name the threads or callbacks that the interpreter waits for at its end: threads first, then exit callbacks."""
    main, own = threading.main_thread(), threading.current_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in (main, own)]
    if not names:
        return "exit callbacks (atexit) have not returned"
    return f"thread {', '.join(map(repr, names))} (not daemon) still runs"


def is_child() -> bool:
    """Return whether :mod:`multiprocessing` started this process, whichever way: it has the role's environment of its parent.

    A child that was spawned runs the main module before it knows of its parent. The fork server has none, imports what it is
    told to preload (from Python 3.14 on the main module, by default), and ends as a main program does, after its parent.
    """
    if multiprocessing.parent_process() is not None or getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    return any("from multiprocessing.forkserver import main" in word for word in sys.orig_argv)
