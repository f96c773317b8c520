"""What handles know of the revision of their memory, and writing to it in place: blocking, and in coroutines."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shared_rpc.memory.revisions import Page

if TYPE_CHECKING:
    from shared_rpc.handle import AsyncIssuer, Issuer

__all__ = ["AsyncRevised", "Revised", "updating", "updating_async"]

T = TypeVar("T")
R = TypeVar("R")


class Revised(Generic[T]):
    """The part of a :class:`shared_rpc.Handle` that is about revisions."""

    object_id: str
    _issuer: Issuer
    _page: Page | None

    if TYPE_CHECKING:

        @property
        def value(self) -> T:
            """See :attr:`shared_rpc.Handle.value`."""

        def _check_held(self) -> None: ...

    @property
    def revision(self) -> int:
        """How often the memory was written in place, by :meth:`Client.update`: even, and odd while somebody writes.

        Each update adds two, from 0. Only the first look asks the server: it is a word of shared memory. What is read after
        it is at least as new as it says. Another generation is another object, and counts from 0.

        :raises StaleHandleError: if the handle was released, or the server is asked and does not own the object.
        """
        return self._need_page().revision

    def wait_revision(self, revision: int, timeout: float | None = None) -> int:
        """Wait until the revision is at least so much, and even: what it is then.

        ``handle.revision + 1`` is the end of the update that is under way, or of the next one.

        Everything that was written in the updates up to it is seen by what this thread reads, or queues on a GPU, after that.

        :param timeout: seconds to wait at most; None for no limit.
        :raises DeadlineExceeded: then.
        :raises UpdateInterrupted: if an update has begun and will not end, because its process was killed or its block raised.
        :raises StaleHandleError: as :attr:`revision`.
        """
        return self._need_page().wait(revision, _until(timeout))

    def read_consistent(self, function: Callable[[T], R], timeout: float | None = None) -> R:
        """``function(handle.value)``, from memory that nobody wrote to meanwhile: what it read is all of one revision.

        An update under way is waited for, and where one came in between, ``function`` is called again: it must have no other
        effects, and return nothing that is still in the memory, so ``clone()`` what is to be kept. What it queues on this
        thread's current stream is waited for. An exception counts if nobody wrote meanwhile.

        :param timeout: seconds after which it is not begun again; None for no limit.
        :raises DeadlineExceeded, UpdateInterrupted, StaleHandleError: as :meth:`wait_revision`.
        """
        value = self.value
        return self._need_page().read(function, value, _until(timeout))

    def _need_page(self) -> Page:
        page = self._page
        if page is None:
            self._check_held()
            page = self._page = self._issuer.revision_page(self.object_id)
        return page


class AsyncRevised(Generic[T]):
    """The part of a :class:`shared_rpc.AsyncHandle` that is about revisions."""

    object_id: str
    _issuer: AsyncIssuer
    _page: Page | None

    if TYPE_CHECKING:

        @property
        def value(self) -> T:
            """See :attr:`shared_rpc.Handle.value`."""

        def _check_held(self) -> None: ...

    @property
    def revision(self) -> Coroutine[Any, Any, int]:
        """See :attr:`Handle.revision`: ``await handle.revision``. Only the first one waits for anything."""
        return self._revision()

    async def _revision(self) -> int:
        return (await self._need_page()).revision

    async def wait_revision(self, revision: int, timeout: float | None = None) -> int:  # noqa: ASYNC109
        """See :meth:`Handle.wait_revision`."""
        page, until = await self._need_page(), _until(timeout)
        while (seen := await _in_thread(functools.partial(page.wait_slice, revision, until))) is None:
            continue
        return seen

    async def read_consistent(self, function: Callable[[T], R], timeout: float | None = None) -> R:  # noqa: ASYNC109
        """See :meth:`Handle.read_consistent`. ``function`` is a plain one, called in a worker thread: there torch's current
        stream and its modes, as ``no_grad``, are the default ones.
        """
        value, until = self.value, _until(timeout)
        page = await self._need_page()
        return await _in_thread(functools.partial(page.read, function, value, until))

    async def _need_page(self) -> Page:
        page = self._page
        if page is None:
            self._check_held()
            page = self._page = await self._issuer.revision_page(self.object_id)
        return page


def _until(timeout: float | None) -> float:
    return time.monotonic() + timeout if timeout is not None else math.inf


@contextmanager
def updating(handle: Revised[T], timeout: float | None) -> Iterator[T]:
    """See :meth:`shared_rpc.Client.update`."""
    value = handle.value
    with handle._need_page().update(_until(timeout)):
        yield value


@asynccontextmanager
async def updating_async(handle: AsyncRevised[T], timeout: float | None) -> AsyncIterator[T]:  # noqa: ASYNC109
    """See :meth:`shared_rpc.AsyncClient.update`. The GPU is waited for in a thread, and by a cancelled block too."""
    from anyio import CancelScope

    value, until = handle.value, _until(timeout)
    page = await handle._need_page()
    while (update := page.try_begin()) is None:
        await _in_thread(functools.partial(page.wait_for_writer, until))
    try:
        yield value
        with CancelScope(shield=True):
            await _in_thread(update.commit)
    finally:
        update.end()


async def _in_thread(work: Callable[[], R]) -> R:
    """In a thread that nobody else waits for; one who is cancelled leaves it to itself."""
    from anyio import CapacityLimiter, to_thread

    return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=CapacityLimiter(1))
