"""Calls that a worker's own code makes: they go to the broker, and know which run they belong to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from shared_rpc.running import CALLED_BY, CURRENT_RUN
from shared_rpc.runtime import ClientRuntime
from shared_rpc.settings import Role

if TYPE_CHECKING:
    from shared_rpc.provider import Provider

__all__ = ["WorkerRuntime"]


class WorkerRuntime(ClientRuntime):
    """A client of the broker that this process works for.

    :param lend: entered while an endpoint waits for another one: one thread more may run endpoints.
    """

    role: Role = "server"

    def __init__(self, provider: Provider, socket: str | None, lend: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(provider, socket)
        self._lend = lend

    @property
    def socket_path(self) -> str:
        """Where the broker listens for this provider, or will."""
        return self.client.socket_path

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`."""
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
        return await anyio.to_thread.run_sync(lambda: self.call(endpoint, args, kwargs))
