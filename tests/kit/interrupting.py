"""Signal handlers that raise at a chosen point of a thread's execution."""

from __future__ import annotations

import contextlib
import dis
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NoReturn

#: The instructions after which CPython checks for pending handlers (3.11 to 3.14, by their names in `dis`).
_LOOKS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}
#: The minimum argument of a RESUME after an await or a `yield from`, where it does not check.
_AWAIT = 2
#: Modules of the standard library in which handlers run as well: those that the package builds upon.
_BENEATH = ("contextlib.py", "weakref.py", "_weakrefset.py", "<string>")


class Interrupted(BaseException):
    """Raised by the handler."""


@contextlib.contextmanager
def raising_handler(kind: type[BaseException], of: signal.Signals = signal.SIGUSR1) -> Iterator[None]:
    """Install a handler that raises; the earlier one is restored at the end."""

    def handler(number: int, frame: object) -> NoReturn:
        raise kind("from the handler")

    earlier = signal.signal(of, handler)
    try:
        yield
    finally:
        signal.signal(of, earlier)


@functools.cache
def _ranges(code: CodeType) -> list[Any]:
    return dis._parse_exception_table(code)  # since 3.11, and not public


def _caught_at(code: CodeType, offset: int) -> int | None:
    return next((entry.target for entry in _ranges(code) if entry.start <= offset < entry.end), None)


#: Callbacks of weak references: like finalisers, their exceptions are dropped by Python.
_CALLBACKS = frozenset({"after_fork.<locals>.<lambda>"})


class _Tracer:
    """Counts the points at which the interpreter may run a handler, in the package's frames, and sends a signal at one.

    A trace function is called before an instruction, and the interpreter checks after one, so the exception belongs to the
    earlier of the two. If they are in different blocks of `try` or `with`, that makes a difference, and no signal is sent. Nor
    is one sent in a finaliser: CPython drops its exceptions.
    """

    def __init__(self, point: int) -> None:
        self.point = point
        self.count = 0
        self.place = ""
        self._last: dict[FrameType, tuple[str, int]] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if event == "call":
            if "/shared_rpc/" not in name and not name.endswith(_BENEATH):
                return None
            if frame.f_code.co_name == "__del__" or frame.f_code.co_qualname in _CALLBACKS:
                return None
            frame.f_trace, frame.f_trace_opcodes = self.trace, True  # in this order for Python 3.13
            self._last.pop(frame, None)
        elif event == "exception":
            self._last.pop(frame, None)
        elif event == "opcode":
            self._step(frame)
        return self.trace

    def _step(self, frame: FrameType) -> None:
        code, offset = frame.f_code, frame.f_lasti
        last, before = self._last.get(frame, ("", 0))
        instruction, argument = dis.opname[code.co_code[offset]], code.co_code[offset + 1]
        looks = instruction in _LOOKS and not (instruction == "RESUME" and argument >= _AWAIT)
        self._last[frame] = (instruction if looks else "", offset)
        if last and _caught_at(code, before) == _caught_at(code, offset):
            self.count += 1
            if self.count == self.point:
                self.place = f"{code.co_qualname}, line {frame.f_lineno}, after {last}"
                self._last.clear()
                signal.raise_signal(signal.SIGUSR1)

    def run(self, operation: Callable[[], object]) -> None:
        sys.settrace(self.trace)
        try:
            operation()
        finally:
            sys.settrace(None)
            self._last.clear()


def points_of(operation: Callable[[], object]) -> int:
    """Count the points of an operation at which a handler may run."""
    tracer = _Tracer(0)
    tracer.run(operation)
    return tracer.count


def interrupted_at(point: int, operation: Callable[[], object]) -> tuple[str, str]:
    """Run an operation, and a handler at one of its points; return the place and the exception, as text, or ``""``."""
    tracer, raised = _Tracer(point), ""
    try:
        tracer.run(operation)
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}"
    return tracer.place, raised
