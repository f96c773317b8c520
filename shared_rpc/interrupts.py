"""Exceptions that signal handlers raise, and those of the code that they interrupt."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from types import CodeType
from typing import Any

__all__ = ["is_of_handler"]


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an error: such an error goes to whoever was interrupted, as it is.

    Python's own handler of SIGINT has no frame in a traceback, so every KeyboardInterrupt counts. A handler that calls
    ``sys.exit()`` is told from code that does by its frame.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: Callable[..., Any] | int | None) -> CodeType | None:
    """Return the code by which a handler begins; None for what is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004  the function, and not whether there is one
        code = getattr(function, "__code__", None)  # of a bound method too
        if isinstance(code, CodeType):
            return code
    return None
