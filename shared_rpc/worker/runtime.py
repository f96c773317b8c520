"""Calls that a worker's own code makes: they go to the broker, and know which run they belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from shared_rpc.client.sync import Client
from shared_rpc.context import CALLED_BY, CURRENT_RUN
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.tasks import TaskInfo
from shared_rpc.runtime import ClientRuntime
from shared_rpc.settings import Role

if TYPE_CHECKING:
    from shared_rpc.provider import Provider

__all__ = ["WorkerRuntime"]


class _WorkerClient(Client):
    """Waits for tasks and refreshes as :meth:`WorkerRuntime.call` waits for calls."""

    def __init__(self, waiting: Callable[[str], AbstractContextManager[None]], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting = waiting

    def wait_for_task(
        self, task_id: str, timeout: float | None = None, callback: Callable[[TaskInfo], object] | None = None
    ) -> Any:
        """See :meth:`Client.wait_for_task`."""
        with self._waiting("wait_for_task"):
            return super().wait_for_task(task_id, timeout, callback)

    def refresh(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Generation:
        """See :meth:`Client.refresh`."""
        with self._waiting("refresh"):
            return super().refresh(endpoint, *args, **kwargs)


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
        super().__init__(provider, socket, functools.partial(_WorkerClient, self._waiting))
        self._lend = lend
        self._here = here

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Entered while code of this process waits for an endpoint."""
        if self._here():
            raise ConfigurationError(
                f"{what}() was called on the worker's event loop, by an async endpoint perhaps: make {what!r} an async def "
                f"and await it, or call it with anyio.to_thread.run_sync"
            )
        run = CURRENT_RUN.get()
        if run is None:
            yield
            return
        token = CALLED_BY.set(run.chain)
        try:
            with self._lend():
                yield
        finally:
            CALLED_BY.reset(token)

    @property
    def socket_path(self) -> str:
        """Where the broker listens for this provider, or will."""
        return self.client.socket_path

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`.

        :raises ConfigurationError: on the event loop that endpoints run on, which would wait for itself.
        """
        with self._waiting(endpoint):
            return super().call(endpoint, args, kwargs)

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`."""
        # A limiter of its own: endpoints that wait for each other must not use up the threads that all of a loop share.
        limiter = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(lambda: self.call(endpoint, args, kwargs), limiter=limiter)
