"""The only patch of other libraries: ``from_pretrained`` of their classes is replaced inside of blocks.

A block belongs to the code that entered it: to its thread, or its task. While any is entered in the process, a class has the
replacement, which checks for a block around its caller, and otherwise behaves like the original. After the last one the class
is restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from shared_rpc.forks import fork_safe_lock

#: Loads instead of a class's method: called with the class, the original, and its arguments.
Loader = Callable[[type, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: The loader of the innermost block, by the class that has the method.
_loaders: ContextVar[dict[type, Loader]] = ContextVar("shared_rpc_loaders")
_lock = fork_safe_lock()


class _Patch:
    """The replacement of one class's method, shared by all blocks."""

    def __init__(self, owner: type) -> None:
        self._owner = owner
        self._blocks = 0
        self._original: Any = None
        self._replacement: Any = None

    def enter(self) -> None:
        """Enter a block; the first one replaces the method."""
        with _lock:
            if self._blocks == 0:
                self._original = vars(self._owner)["from_pretrained"]
                self._replacement = classmethod(_replacement(self._owner, self._original.__func__))
                setattr(self._owner, "from_pretrained", self._replacement)  # noqa: B010  the method is any class's
            self._blocks += 1

    def leave(self) -> None:
        """Leave a block; the last one restores the method, unless other code has wrapped it."""
        with _lock:
            self._blocks -= 1
            if self._blocks == 0 and vars(self._owner)["from_pretrained"] is self._replacement:
                setattr(self._owner, "from_pretrained", self._original)  # noqa: B010


_patches: dict[type, _Patch] = {}


def _replacement(owner: type, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        loader = _loaders.get({}).get(owner)
        if loader is None:
            return original(cls, *args, **kwargs)
        return loader(cls, functools.partial(original, cls), args, kwargs)

    return from_pretrained


@contextmanager
def replaced(loaders: dict[type, Loader]) -> Iterator[None]:
    """Replace ``from_pretrained`` of classes and their subclasses for the code in a block. The innermost block applies."""
    with ExitStack() as stack:
        for owner in loaders:
            with _lock:
                patch = _patches.setdefault(owner, _Patch(owner))
            patch.enter()
            stack.callback(patch.leave)
        stack.enter_context(_entered({**_loaders.get({}), **loaders}))
        yield


def ordinarily() -> AbstractContextManager[None]:
    """Return a block in which nothing is replaced."""
    return _entered({})


@contextmanager
def _entered(loaders: dict[type, Loader]) -> Iterator[None]:
    token = _loaders.set(loaders)
    try:
        yield
    finally:
        _loaders.reset(token)
