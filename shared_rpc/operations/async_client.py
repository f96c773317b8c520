"""The client for coroutines."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from shared_rpc.client.asynchronous import CoroutineDriver
from shared_rpc.handle import AsyncHandle, updating_async
from shared_rpc.operations import Operations
from shared_rpc.operations.binding import Context, bound
from shared_rpc.operations.generations import AsyncRefreshIterator

__all__ = ["AsyncClient"]

T = TypeVar("T")


@bound
class AsyncClient(CoroutineDriver, Operations, Context):
    """:class:`Client` for coroutines: the same operations, by the same names, to be awaited.

    All of them go over one connection, at once, and none waits for another. Rebuilding a large value, and copying memory in
    arguments, is done in threads, so that the event loop goes on. Cancelling the scope that awaits an operation takes the
    request back, and leaves the connection to the others. A client belongs to the event loop it is first used on.

    A callback of :meth:`wait_for_task` and :meth:`watch_task` may be a coroutine function, and is called on the loop; one of
    :meth:`on_refresh` is a plain function, and called in a thread: what belongs on the loop is for :meth:`refreshes`.

    For the parameters see :class:`Client`.
    """

    def refreshes(self) -> AsyncRefreshIterator:
        """See :meth:`Client.refreshes`: ``async for``, and ``async with`` around it."""
        return AsyncRefreshIterator(self._run)

    def update(self, handle: AsyncHandle[T], timeout: float | None = None) -> AbstractAsyncContextManager[T]:
        """See :meth:`Client.update`: ``async with client.update(handle) as value:``."""
        return updating_async(handle, timeout)
