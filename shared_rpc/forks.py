"""The registry of functions called in a forked child before its own code.

First every lock of :func:`fork_safe_lock` is freed, then the callbacks of :func:`after_fork` run, in order of registration,
each regardless of exceptions in others, which are reported as unraisable. Signals stay blocked until then, see
:mod:`shared_rpc.lifecycle.signals`.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[[], object])

_numbers = itertools.count()
#: By registration number. Each returns a callback, or None if its object is just being freed.
_callbacks: dict[int, Callable[[], Callable[[], object] | None]] = {}
#: RLocks; the annotations leave out the private methods used here.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def after_fork(callback: F) -> F:
    """Call a function in every child that this process forks. Also a decorator.

    A bound method is called while its object lives, and held by a weak reference.
    """
    number = next(_numbers)
    if isinstance(callback, MethodType):
        function, pop = callback.__func__, _callbacks.pop
        # Not weakref.WeakMethod, whose own callback may fail at the end of the interpreter (seen on 3.11).
        reference = weakref.ref(callback.__self__, lambda _: pop(number, None))
        _callbacks[number] = lambda: MethodType(function, owner) if (owner := reference()) is not None else None
    else:
        _callbacks[number] = lambda: callback
    return callback


def fork_safe_lock() -> threading.RLock:
    """Return a reentrant lock that is free in a forked child, unless the forking thread holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _begin_child() -> None:
    for lock in list(_locks):
        # Private; the standard library resets its own locks by them: in Python 3.9 to 3.14.
        if not lock._is_owned():
            lock._at_fork_reinit()
    # Callbacks of objects dropped by an earlier callback must run too: references to all are taken first.
    callbacks = [callback for found in list(_callbacks.values()) if (callback := found()) is not None]
    for callback in callbacks:
        _call(callback)


def _call(callback: Callable[[], object]) -> None:
    """Call a function as the callback of a weak reference: the interpreter reports its exceptions."""
    occasion = set[None]()
    reference = weakref.ref(occasion, lambda _: callback())
    del occasion
    assert reference() is None, "the only reference was the callback's"


os.register_at_fork(after_in_child=_begin_child)
