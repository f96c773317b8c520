"""The client for coroutines."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from shared_rpc.client.asynchronous import CoroutineDriver
from shared_rpc.operations import Operations
from shared_rpc.operations.binding import bound
from shared_rpc.operations.generations import AsyncRefreshIterator
from shared_rpc.operations.handles import AsyncHandle, in_thread, until_of
from shared_rpc.operations.sources import AsyncSource

T = TypeVar("T")


@bound
class AsyncClient(CoroutineDriver, Operations):
    """:class:`Client` for coroutines: the same operations, by the same names, to be awaited.

    All of them share one connection, concurrently, and none waits for another. Large values are rebuilt, and memory in
    arguments is copied, in threads, so the event loop is not blocked. Cancelling the scope of an operation withdraws the
    request, and does not affect others. A client belongs to the event loop of its first use.

    A callback of :meth:`wait_for_task` and :meth:`watch_task` may be a coroutine function, and is called on the loop.

    For the parameters see :class:`Client`.
    """

    def refreshes(self) -> AsyncRefreshIterator:
        """Iterate like :meth:`Client.refreshes`: ``async for``, and ``async with`` around it."""
        return AsyncRefreshIterator(self)

    def source(self) -> AsyncSource:
        """Return a source of records, like :meth:`Client.source`: ``async with``, and ``async for`` in it."""
        return AsyncSource(self)

    @asynccontextmanager
    async def update(self, handle: AsyncHandle[T], timeout: float | None = None) -> AsyncIterator[T]:
        """Write in place like :meth:`Client.update`: ``async with client.update(handle) as value:``.

        A thread waits for the GPU, even if the block is cancelled.
        """
        value, until = handle.value, until_of(timeout)
        page = await handle._need_page()
        while (update := page.try_begin()) is None:
            await in_thread(functools.partial(page.wait_for_writer, until))
        try:
            yield value
            with anyio.CancelScope(shield=True):
                await in_thread(update.commit)
        finally:
            update.end()
