"""Calls by a worker's own code, sent to the broker with the run that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio
import anyio.to_thread

from shared_rpc.client.base import OperationState
from shared_rpc.client.steps import Reply, Request
from shared_rpc.context import CURRENT_RUN
from shared_rpc.errors import ConfigurationError
from shared_rpc.operations.client import Client
from shared_rpc.protocol import messages as m
from shared_rpc.provider.loopback import OF_ENDPOINTS, on_the_loop
from shared_rpc.provider.runtime import ClientRuntime
from shared_rpc.settings import Role


class _WorkerClient(Client):
    """A client of this process's broker. For the parameters see :class:`WorkerRuntime`."""

    def __init__(self, lend: Callable[[], AbstractContextManager[None]], here: Callable[[], bool], **options: Any) -> None:
        super().__init__(**options)
        self._lend_thread = lend
        self._here = here

    def _exchange(self, request: Request, state: OperationState) -> Reply:
        if type(request.message) not in OF_ENDPOINTS:
            return super()._exchange(request, state)
        self._check_wait(request)
        run = CURRENT_RUN.get()
        if run is None:
            return super()._exchange(request, state)
        if isinstance(request.message, m.Call):
            request.message.chain = sorted(run.chain)
        with self._lend_thread():
            return super()._exchange(request, state)

    def _check_wait(self, request: Request) -> None:
        if self._here():
            raise ConfigurationError(on_the_loop(request, "worker"))


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
        super().__init__(_WorkerClient(lend, here, socket_path=socket, **options))

    @property
    def socket_path(self) -> str:
        """The path of the broker's socket for this provider."""
        return self.operations.socket_path

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an endpoint in a thread."""
        # Its own limiter: endpoints that wait for each other must not exhaust the loop's shared threads.
        limiter = anyio.CapacityLimiter(1)
        return await anyio.to_thread.run_sync(lambda: self.operations.call(endpoint, *args, **kwargs), limiter=limiter)
