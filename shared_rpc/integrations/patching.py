"""The one place where other people's classes are changed: their ``from_pretrained``, while a block is entered.

A block is of the code that entered it: of its thread, or its task. While any is entered anywhere in the process, a class has
the replacement, which asks whose block it is called in, and is the original outside of all. After the last one the class is
as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from shared_rpc.forks import fork_safe_lock

#: Loads in place of a class's method: called with the class, the original, and its arguments.
Loader = Callable[[type, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: The loader of the innermost block, by the class that has the method.
_loaders: ContextVar[dict[type, Loader]] = ContextVar("shared_rpc_loaders")
_lock = fork_safe_lock()


class _Patch:
    """A class's own method, and how many blocks there are in which it is replaced."""

    def __init__(self, owner: type) -> None:
        self._owner = owner
        self._blocks = 0
        self._original: Any = None
        self._replacement: Any = None

    def enter(self) -> None:
        """Replace the method, in the first block."""
        with _lock:
            if self._blocks == 0:
                self._original = vars(self._owner)["from_pretrained"]
                self._replacement = classmethod(_replacement(self._owner, self._original.__func__))
                setattr(self._owner, "from_pretrained", self._replacement)  # noqa: B010  the method is any class's
            self._blocks += 1

    def leave(self) -> None:
        """Restore the method after the last block; one that others have put around it since stays."""
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
    """Replace the ``from_pretrained`` of classes, and of those that inherit it, for the code of the block.

    Of blocks in each other the inner one counts.
    """
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
