"""Which modules a block of code has built: by its own thread, and not by a block within it."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch import nn

__all__ = ["Construction"]

_threads = threading.local()
_lock = threading.Lock()
#: How many blocks are open, in all threads. While there are any, ``nn.Module.__init__`` tells of each module.
_open = 0
_init: Callable[..., None] = nn.Module.__init__


def _after_fork() -> None:
    global _lock  # noqa: PLW0603  another thread of the parent may have held it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _telling(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def initialise(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        blocks: list[Construction] = getattr(_threads, "blocks", [])
        if blocks:
            blocks[-1]._modules.append(weakref.ref(self))

    return initialise


class Construction:
    """The modules that are built while it is entered, in this thread.

    For the others nothing changes: they find one attribute more to look at when they build a module.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []

    def __enter__(self) -> Construction:
        global _open, _init  # noqa: PLW0603
        with _lock:
            if _open == 0:
                _init = nn.Module.__init__
                nn.Module.__init__ = _telling(_init)  # type: ignore[method-assign]
            _open += 1
        if not hasattr(_threads, "blocks"):
            _threads.blocks = []
        _threads.blocks.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        global _open  # noqa: PLW0603
        _threads.blocks.remove(self)
        with _lock:
            _open -= 1
            # Somebody else may have put another function around it meanwhile; then it stays, and finds no block.
            if _open == 0 and getattr(nn.Module.__init__, "__wrapped__", None) is _init:
                nn.Module.__init__ = _init  # type: ignore[method-assign]

    def roots(self) -> list[nn.Module]:
        """Those that are alive and a part of no other one, in the order they were begun."""
        modules = {id(module): module for module in self._alive()}
        parts = {id(part) for module in modules.values() for part in module.children()}
        return [module for key, module in modules.items() if key not in parts]

    def _alive(self) -> Iterator[nn.Module]:
        for reference in self._modules:
            module = reference()
            # One whose constructor has failed may be there, and not be whole.
            if module is not None and "_modules" in vars(module):
                yield module
