"""Calls by a worker's own code, sent to the broker with the run that they belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import anyio
import anyio.to_thread

from shared_rpc.client.blocking import BlockingDriver
from shared_rpc.client.steps import Operation
from shared_rpc.context import CALLED_BY, CURRENT_RUN
from shared_rpc.errors import ConfigurationError
from shared_rpc.operations.binding import bound
from shared_rpc.operations.client import Client
from shared_rpc.provider.runtime import ClientRuntime
from shared_rpc.settings import Role

#: Operations that wait for an endpoint's end.
_WAITS = {"call", "execute", "refresh", "wait_for_task", "watch_task"}


class _WaitingDriver(BlockingDriver):
    """A driver that reports its waits for endpoints to the worker: see :meth:`WorkerRuntime._waiting`."""

    _waiting: Callable[[str], AbstractContextManager[None]]

    @classmethod
    def _bound(cls, name: str, body: Callable[..., Operation[Any]]) -> Callable[..., Any]:
        drive = super()._bound(name, body)
        if name not in _WAITS:
            return drive

        def method(self: _WaitingDriver, /, *args: Any, **kwargs: Any) -> Any:
            if name == "execute" and not kwargs.get("wait", True):
                return drive(self, *args, **kwargs)
            with self._waiting(str(args[0]) if name == "call" and args else name):
                return drive(self, *args, **kwargs)

        return method


@bound
class _WorkerClient(_WaitingDriver, Client):
    """A client of this process's broker."""

    def __init__(self, waiting: Callable[[str], AbstractContextManager[None]], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting = waiting


class WorkerRuntime(ClientRuntime):
    """The runtime of a client of this process's broker.

    :param lend: entered while an endpoint waits for another one: one more thread may run endpoints.
    :param here: returns True if the caller is on the loop of the endpoints, where it must not wait for them.
    """

    role: Role = "server"

    def __init__(
        self,
        options: dict[str, Any],
        socket: str | None,
        lend: Callable[[], AbstractContextManager[None]],
        here: Callable[[], bool],
    ) -> None:
        super().__init__(options, socket, functools.partial(_WorkerClient, self._waiting))
        self._lend = lend
        self._here = here

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Allow one more thread while code of this process waits for an endpoint, and mark the call as its own."""
        if self._here():
            raise ConfigurationError(
                f"{what}() was called on the worker's event loop, perhaps by an async endpoint: make {what!r} an async def "
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
        """The path of the broker's socket for this provider."""
        return self.operations.socket_path

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an endpoint in a thread."""
        # Its own limiter: endpoints that wait for each other must not exhaust the loop's shared threads.
        limiter = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(lambda: self.operations.call(endpoint, *args, **kwargs), limiter=limiter)
