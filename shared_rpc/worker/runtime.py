"""Calls that a worker's own code makes: they go to the broker, and know which run they belong to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from shared_rpc.errors import ConfigurationError
from shared_rpc.running import CALLED_BY, CURRENT_RUN
from shared_rpc.runtime import ClientRuntime
from shared_rpc.settings import Role

if TYPE_CHECKING:
    from shared_rpc.provider import Provider

__all__ = ["WorkerRuntime"]


class WorkerRuntime(ClientRuntime):
    """A client of the broker that this process works for.

    :param lend: entered while an endpoint waits for another one: one thread more may run endpoints.
    :param here: whether the caller is on the loop that endpoints run on, where it must not wait for them.
    """

    role: Role = "server"

    def __init__(
        self,
        provider: Provider,
        socket: str | None,
        lend: Callable[[], AbstractContextManager[None]],
        here: Callable[[], bool],
    ) -> None:
        super().__init__(provider, socket)
        self._lend = lend
        self._here = here

    @property
    def socket_path(self) -> str:
        """Where the broker listens for this provider, or will."""
        return self.client.socket_path

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`.

        :raises ConfigurationError: on the event loop that endpoints run on, which would wait for itself.
        """
        if self._here():
            raise ConfigurationError(
                f"{endpoint}() was called on the worker's event loop, by an async endpoint perhaps: make {endpoint!r} an "
                f"async def and await it, or call it with anyio.to_thread.run_sync"
            )
        run = CURRENT_RUN.get()
        if run is None:
            return super().call(endpoint, args, kwargs)
        token = CALLED_BY.set(run.chain)
        try:
            with self._lend():
                return super().call(endpoint, args, kwargs)
        finally:
            CALLED_BY.reset(token)

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`."""
        # A limiter of its own: endpoints that wait for each other must not use up the threads that all of a loop share.
        limiter = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(lambda: self.call(endpoint, args, kwargs), limiter=limiter)
