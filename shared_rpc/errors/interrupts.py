"""Exceptions that signal handlers raise, and those of the code that they interrupt."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

#: The package's directory: no signal handler is in it, but most errors that end a wait are raised there.
_ROOT = os.path.dirname(os.path.dirname(__file__))
_QUIET = tuple(os.path.join(_ROOT, room, "") for room in ("client", "protocol"))

__all__ = ["is_interrupt", "is_of_handler", "passed_over"]


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an error: such an error goes to the interrupted code unchanged.

    Python's own handler of SIGINT has no frame in a traceback, so every KeyboardInterrupt counts. A handler that calls
    ``sys.exit()`` is told from code that does by its frame.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    traceback, passed = error.__traceback__, set()
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_QUIET):
            passed.add(code)
        traceback = traceback.tb_next
    return bool(passed) and not passed.isdisjoint(map(_code_of, map(signal.getsignal, signal.valid_signals())))


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error may come from anywhere in the code that it ends: from a signal handler, or from whatever else
    raises another kind of :class:`BaseException`.
    """
    return not isinstance(error, Exception) or is_of_handler(error)


class passed_over:
    """A block whose errors of some kinds are passed over, as by :func:`contextlib.suppress`, but those of signal handlers not.

    A handler of timeouts often raises :class:`TimeoutError`, which is an :class:`OSError`.
    """

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        return isinstance(error, self._kinds) and not is_of_handler(error)


def _code_of(handler: Callable[..., Any] | int | None) -> CodeType | None:
    """Return the code object of a handler; None for a handler not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, *(vars(kind).get("__call__") for kind in type(handler).__mro__)):
        code = getattr(function, "__code__", None)  # bound methods have it too
        if isinstance(code, CodeType):
            return code
    return None
