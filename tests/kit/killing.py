"""Processes that end by SIGKILL at a step of their work: before a function of the package, or after it.

A test has a process watch functions, by :meth:`Killing.code`, and names the step at which it is to end. The package has no
support for that: functions get other code in the process that is to end.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec


class _Reached(msgspec.Struct):
    """The process that ends, and the step."""

    pid: int
    step: str


class Killing:
    """A step at which one process ends; communicated by files in a folder.

    A step is ``before f`` or ``after f``, where f is a function as named in :meth:`code`. Several steps, separated by commas,
    are passed in order, and the last one ends the process. A coroutine or generator counts from its begin to its return.

    :param folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def code(self, functions: Mapping[str, str]) -> str:
        """Return the code by which a process watches functions, given by their modules and qualified names."""
        return f"from tests.kit import killing\nkilling.watch({str(self._folder)!r}, {dict(functions)!r})\n"

    def arm(self, step: str) -> None:
        """From now on, end the first process that reaches the step."""
        (self._folder / "new").write_text(step)
        (self._folder / "new").rename(self._folder / "armed")

    @property
    def reached(self) -> tuple[int, str] | None:
        """The process that has ended, and its step; None if none has."""
        try:
            found = msgspec.json.decode((self._folder / "reached").read_bytes(), type=_Reached)
        except FileNotFoundError:
            return None
        return found.pid, found.step


class _Watching:
    """The state of a process that watches functions."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.folder = Path()
        self._lock = threading.Lock()
        self._left: list[str] = []

    def passes(self, place: str) -> None:
        """Record that the process has reached a place; end it if that is the step."""
        with self._lock:
            try:
                step = (self.folder / "armed").read_text()
            except FileNotFoundError:
                return
            self._left = self._left or step.split(", ")
            if self._left[0] != place:
                return
            del self._left[0]
            if not self._left:
                self._end(step)

    def _end(self, step: str) -> None:
        (self.folder / "armed").unlink()
        new = self.folder / f"new-{os.getpid()}"
        new.write_bytes(msgspec.json.encode(_Reached(os.getpid(), step)))
        new.rename(self.folder / "reached")
        os.kill(os.getpid(), signal.SIGKILL)


_watching = _Watching()


def watch(folder: str, functions: Mapping[str, str]) -> None:
    """Make functions report their calls and returns in this process, including through existing references."""
    _watching.folder = Path(folder)
    for name, module in functions.items():
        _replace(name, _found(importlib.import_module(module), name.split(".")))


def _found(place: Any, path: Iterable[str]) -> FunctionType:
    for name in path:
        place = inspect.getattr_static(place, name)
    place = inspect.unwrap(place)  # a context manager wraps a generator function
    assert isinstance(place, FunctionType), place
    return place


def _replace(name: str, function: FunctionType) -> None:
    """Give a function other code: bound methods refer to the function, and would miss a replacement."""
    own = FunctionType(function.__code__, function.__globals__, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    _watching.functions[name] = own
    source = f"lambda *args, **kwargs: __import__({__name__!r}, fromlist=['called']).called({name!r}, args, kwargs)"
    function.__code__ = eval(source).__code__
    function.__defaults__ = function.__kwdefaults__ = None


def called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a watched function."""
    function = _watching.functions[name]
    if inspect.iscoroutinefunction(function):
        return _awaited(name, functools.partial(function, *args, **kwargs))
    if inspect.isgeneratorfunction(function):
        return _generated(name, functools.partial(function, *args, **kwargs))
    _watching.passes(f"before {name}")
    result = function(*args, **kwargs)
    _watching.passes(f"after {name}")
    return result


async def _awaited(name: str, call: Callable[[], Any]) -> Any:
    _watching.passes(f"before {name}")
    result = await call()
    _watching.passes(f"after {name}")
    return result


def _generated(name: str, call: Callable[[], Any]) -> Any:
    _watching.passes(f"before {name}")
    result = yield from call()
    _watching.passes(f"after {name}")
    return result
