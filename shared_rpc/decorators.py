"""What ``Provider.share`` with options returns, as type checkers see it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from shared_rpc.handle import Handle
    from shared_rpc.provider import SharedFunction

__all__ = ["Decorator", "ManagedDecorator"]

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What ``share(...)`` returns."""

    def __call__(self, function: Callable[P, R], /) -> SharedFunction[P, R]:
        """The function as an endpoint."""


class ManagedDecorator(Protocol):
    """What ``share(managed=True)`` returns."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> SharedFunction[P, Coroutine[Any, Any, Handle[R]]]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> SharedFunction[P, Handle[R]]: ...
