"""What ``Provider.share`` makes of a function, and the types of the decorators it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from shared_rpc.endpoints import Endpoint
from shared_rpc.handle import Handle
from shared_rpc.operations import Operations

__all__ = ["Decorator", "ManagedDecorator", "SharedFunction"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class SharedFunction(Generic[P, R_co]):
    """An endpoint, called like the function it was made from. Made by :meth:`Provider.share`."""

    def __init__(self, provider: Operations, endpoint: Endpoint) -> None:
        functools.update_wrapper(self, endpoint.function)
        self._provider = provider
        self._endpoint = endpoint

    @property
    def name(self) -> str:
        """The endpoint's name."""
        return self._endpoint.spec.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """The result, wherever it is made; a :class:`Handle` where the endpoint is managed.

        An ``async def`` endpoint gives an awaitable, in every role.
        """
        runtime = self._provider._runtime()
        carry_out = runtime.acall if self._endpoint.spec.is_async else runtime.call
        return cast(R_co, carry_out(self.name, args, kwargs))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Have the call run as a task: its id. See :meth:`Client.submit`."""
        return self._provider.submit(self.name, *args, **kwargs)

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """Drop the cached result of this call; 1 if there was one."""
        return self._provider.invalidate_call_cache(self.name, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<shared function {self.name}>"


class Decorator(Protocol):
    """What ``share(...)`` returns."""

    def __call__(self, function: Callable[P, R], /) -> SharedFunction[P, R]:
        """Make a function an endpoint."""


class ManagedDecorator(Protocol):
    """What ``share(managed=True)`` returns."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> SharedFunction[P, Coroutine[Any, Any, Handle[R]]]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> SharedFunction[P, Handle[R]]: ...
