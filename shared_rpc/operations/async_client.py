"""The client for coroutines."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

from shared_rpc.client.asynchronous import CoroutineDriver
from shared_rpc.client.handle import AsyncHandle, updating_async
from shared_rpc.operations import Operations
from shared_rpc.operations.binding import bound
from shared_rpc.operations.generations import AsyncRefreshIterator
from shared_rpc.operations.sources import AsyncSource

if TYPE_CHECKING:
    import torch

    from shared_rpc.operations.channels import AsyncTensorChannel

T = TypeVar("T")


@bound
class AsyncClient(CoroutineDriver, Operations):
    """:class:`Client` for coroutines: the same operations, by the same names, to be awaited.

    All of them go over one connection, at once, and none waits for another. Large values are rebuilt, and memory in arguments
    is copied, in threads, so that the event loop goes on. Cancelling the scope that awaits an operation withdraws the request,
    and leaves the connection to the others. A client belongs to the event loop that it is first used on.

    A callback of :meth:`wait_for_task` and :meth:`watch_task` may be a coroutine function, and is called on the loop. One of
    :meth:`on_refresh` is a plain function, called in a thread: use :meth:`refreshes` for work on the loop.

    For the parameters see :class:`Client`.
    """

    def refreshes(self) -> AsyncRefreshIterator:
        """Iterate as :meth:`Client.refreshes` does: ``async for``, and ``async with`` around it."""
        return AsyncRefreshIterator(self)

    async def create_channel(
        self, name: str, nbytes: int, slots: int = 2, readers: int = 1, device: torch.device | str | None = None
    ) -> AsyncTensorChannel:
        """Make a channel, as :meth:`Client.create_channel` does."""
        from shared_rpc.operations.channels import AsyncTensorChannel

        return AsyncTensorChannel(await self._create_channel(name, nbytes, slots, readers, device))

    async def open_channel(self, name: str, timeout: float = 0.0) -> AsyncTensorChannel:
        """Return a channel, as :meth:`Client.open_channel` does."""
        from shared_rpc.operations.channels import AsyncTensorChannel

        return AsyncTensorChannel(await self._open_channel(name, timeout))

    def source(self) -> AsyncSource:
        """Return a source of records, as :meth:`Client.source` does: ``async with``, and ``async for`` in it."""
        return AsyncSource(self)

    def update(self, handle: AsyncHandle[T], timeout: float | None = None) -> AbstractAsyncContextManager[T]:
        """Write in place as :meth:`Client.update` does: ``async with client.update(handle) as value:``."""
        return updating_async(handle, timeout)
