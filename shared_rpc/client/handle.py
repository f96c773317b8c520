"""Handles: leases on objects of a server."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from shared_rpc.errors import CapabilityError, HandleSuspended, StaleHandleError
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.revisions import Page
from shared_rpc.protocol.infos import ObjectInfo
from shared_rpc.protocol.ticket import Ticket

T = TypeVar("T")
R = TypeVar("R")


class Lease(Generic[T]):
    """A lease on an object of the server, and the object itself: the base of all handles."""

    def __init__(self, value: T, *, object_id: str, server_id: str, generation: int, issuer: Any, session: object) -> None:
        #: The id by which the server knows the object.
        self.object_id = object_id
        #: The id of the server that owns the object.
        self.server_id = server_id
        #: The number of the build for the same cache key, from 1.
        self.generation = generation
        self._value = value
        #: The client or role that the lease is returned to, with its public methods.
        self._issuer = issuer
        self._session = session
        self._released = False
        self._lock = threading.Lock()
        #: The object's revision page, None before its first use.
        self._page: Page | None = None
        #: Whether it is suspended, whether it is to be outside of blocks that need it, and how many such blocks there are.
        self._suspended = False
        self._resting = False
        self._blocks = 0
        #: Whether the memory of this process is an earlier one than the server's, see :meth:`_fall_behind`.
        self._outdated = False
        FINALIZER.start()

    @property
    def value(self) -> T:
        """Return the object, as the endpoint returned it.

        :raises StaleHandleError: once the handle was released.
        :raises HandleSuspended: while the handle is suspended.
        """
        self._check_held()
        if self._suspended or self._outdated:
            why = "its memory may not be touched"
            if not self._suspended:
                why = "its memory here is an earlier one, because it was evicted while the session with the server was lost"
            raise HandleSuspended(
                f"the handle of object {self.object_id} is suspended, and {why}: resume() it first, or use its value in a "
                f"block 'with handle.active() as value:'"
            )
        return self._value

    @property
    def suspended(self) -> bool:
        """Return whether the handle is suspended: :attr:`value` cannot be used before it is resumed.

        A handle that was active is suspended where its object was evicted while the session with the server was lost, and the
        new session could not map its present memory at once.
        """
        return (self._suspended or self._outdated) and not self._released

    @property
    def _asleep(self) -> bool:
        """Return whether this process has promised not to touch the memory, so that it can be unmapped."""
        return self._suspended and not self._released

    @property
    def released(self) -> bool:
        """Return whether the lease was released."""
        return self._released

    def _check_held(self) -> None:
        if self._released:
            raise StaleHandleError(f"the handle of object {self.object_id} was released", reason="released")

    def in_session(self, session: object) -> bool:
        """Return whether the lease is in a session, and was not released."""
        return self._session is session and not self._released

    def move_to(self, session: object) -> bool:
        """Note that the lease is in another session from here on; return False if it was released."""
        with self._lock:
            if not self._released:
                self._session = session
            return not self._released

    # States of a suspension, see shared_rpc.client.suspension.

    def _rest(self) -> bool:
        """Note that the handle is to be suspended, outside of blocks; return whether that is to be done now.

        :raises StaleHandleError: if it was released.
        """
        self._check_held()
        with self._lock:
            self._resting = True
            return not self._suspended and not self._blocks

    def _fall_asleep(self) -> bool:
        """Become suspended, if that is wanted still."""
        with self._lock:
            if self._released or self._blocks or not self._resting:
                return False
            self._suspended = True
            return True

    def _end_rest(self) -> None:
        """Note that the handle is to be active.

        :raises StaleHandleError: if it was released.
        """
        self._check_held()
        self._resting = False

    def _wake(self) -> None:
        """Become active: the memory is there."""
        with self._lock:
            self._suspended = self._outdated = False

    def _stay_awake(self) -> None:
        """Note that the handle could not be suspended, and that no end of a block is to do it."""
        with self._lock:
            self._suspended = self._resting = False

    def _fall_behind(self) -> None:
        """Become suspended without a promise: the server has other memory, and what is mapped here stays until then."""
        self._outdated = True

    def _let_go(self) -> None:
        """Drop the value, while the handle is suspended."""
        nothing: Any = None
        with self._lock:
            if self._suspended:
                self._value = nothing

    def _take(self, value: T) -> None:
        """Have the object's present value, before the handle wakes."""
        with self._lock:
            if not self._released:
                self._value = value

    def _enter_block(self) -> None:
        """Begin a block that needs the handle active.

        :raises StaleHandleError: if it was released.
        """
        self._check_held()
        with self._lock:
            self._blocks += 1

    def _leave_block(self) -> bool:
        """End such a block; return whether the handle is to be suspended now."""
        with self._lock:
            self._blocks -= 1
            return self._resting and not self._blocks and not self._released

    def _forgo(self) -> bool:
        """Drop the value; return whether there is a lease to release."""
        with self._lock:
            if self._released:
                return False
            self._released = True
        # Not unmapped here: another thread may wait on the page.
        nothing: Any = None
        self._value = self._page = nothing
        return True

    def _return_soon(self) -> None:
        """Have another thread return the lease of a dropped handle."""
        issuer, object_id, session = self._issuer, self.object_id, self._session
        FINALIZER.submit(lambda: issuer._end_lease_soon(object_id, session))

    def __reduce__(self) -> NoReturn:
        raise CapabilityError(
            f"cannot pickle or copy the handle of object {self.object_id}, because its lease belongs to this process: "
            f"call the endpoint in the process that needs the object"
        )

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            self._released = True
            self._return_soon()

    def __repr__(self) -> str:
        state = "released" if self._released else "suspended" if self.suspended else type(self._value).__name__
        return f"<{type(self).__name__} {self.object_id} generation {self.generation}: {state}>"


class Handle(Lease[T]):
    """A lease on an object of the server, and the object itself.

    The lease is released by :meth:`release`, at the end of a ``with`` block, by garbage collection, by closing the
    client, and by the end of the process, however it comes. Tensors taken from :attr:`value` stay valid after that: a
    mapping of this process holds their memory.
    """

    def release(self) -> None:
        """Give the lease back and drop the value. Calling it again does nothing; it raises no error of its own."""
        if self._forgo():
            self._issuer._end_lease(self.object_id, self._session)

    def get_object_info(self, refresh: bool = False) -> ObjectInfo:
        """Return the server's present description of the object; the server is asked each time.

        :param refresh: without effect, for code that was written for shared-tensor: no earlier answer is kept.
        :raises StaleHandleError: if the server does not own the object any more.
        """
        info: ObjectInfo = self._issuer.get_object_info(self.object_id)
        return info

    def is_stale(self) -> bool:
        """Ask whether the server that issued the handle has ended, or has dropped the object.

        :raises DeadlineExceeded: if the server does not answer in the client's timeout.
        """
        try:
            self._issuer.ensure_handle_live(self)
        except StaleHandleError:
            return True
        return False

    def is_current(self) -> bool:
        """Ask whether the endpoint's next caller gets this very object.

        It is False once another generation is current or the object was invalidated, and for a stale handle. An object that is
        not cached has no generations: it is current for as long as the server owns it.

        :raises ConnectError, ConnectionClosed: if the server cannot be asked.
        """
        try:
            return not self._released and bool(self._issuer.get_object_info(self.object_id)["current"])
        except StaleHandleError:
            return False

    def latest(self) -> Handle[T]:
        """Return a new handle, of the generation that is current now: of the same object, if that is current still.

        This handle stays as it is, and is to be released as any other. Nothing is built, and nothing is waited for.

        :raises StaleHandleError: if this handle is stale; with ``reason="invalidated"`` if no generation is current.
        """
        found: Handle[T] = self._issuer.latest(self)
        return found

    def ticket(self, path: str | os.PathLike[str] | None = None) -> Ticket:
        """Return a ticket, with which another process of this host and user gets the object by :meth:`Client.open_ticket`.

        A ticket is no lease: the object must be cached, or held by some process, until then.

        :param path: a file to write it to, whole or not at all, for this user alone (0600); None to write none.
        :raises StaleHandleError: if the server does not own the object any more.
        :raises CapabilityError: in the local role, where no other process can have the object.
        :raises ConfigurationError: if the file cannot be written.
        """
        self._check_held()
        socket_path = self._issuer.socket_path
        return _issued(Ticket.of(self.get_object_info(), socket_path), path)

    def suspend(self) -> None:
        """Give the object's memory up for a while: it is unmapped in this process, and the handle keeps its lease.

        The process promises not to touch tensors of :attr:`value` until :meth:`resume`: a touch on the host ends it by SIGSEGV,
        a kernel's on a GPU breaks its context. Their addresses are kept, so that they, and CUDA graphs over them, are good
        again then. Memory goes when no handle of the object is active in this process, and nothing of another object lies in
        it; copies that the process has of its own stay (``tensors="parameters"``, and pages of arrays that it wrote to). Then
        the server may evict the object. In a block of :meth:`active` it takes effect at the block's end. A tensor that outlives
        its handle is unmapped too, while another handle of the object is suspended and none is active.

        Suspending twice is harmless. Everything that does not touch the memory can be used while it is suspended, as
        :attr:`revision`,
        :meth:`latest` and :meth:`release`.

        In the process that has run the endpoint, as in the local role, the object is the endpoint's own result, which others
        there may refer to: nothing is unmapped, and the suspended handle drops its value instead. The resumed one has the same
        object again or, if it was evicted since, one over the restored memory; tensors that were taken from the earlier one
        keep the memory that was evicted.

        :raises StaleHandleError: if the lease has ended, so that nothing would bring the memory back. Nothing has changed then.
        :raises CapabilityError: if the memory cannot be mapped again at its address, as that of legacy CUDA IPC and of pools,
            or while a CUDA graph is captured. Nothing has changed then.
        """
        self._issuer.suspend(self)

    def resume(self, timeout: float | None = None) -> None:
        """Have the object's memory back, at its address: the server restores it first if it was evicted.

        Resuming twice is harmless.

        :param timeout: seconds to wait at most, until the device has the capacity; None for the client's own timeout.
        :raises ServerBusy: if the device had too little capacity until then; the message says who uses what. The handle is
            still suspended, as after any error here.
        :raises DeadlineExceeded: if the wait was for anything else, as the copy itself.
        :raises StaleHandleError: if the server does not own the object any more, or the lease has ended.
        :raises CapabilityError: if this process cannot map the memory now.
        """
        self._issuer.resume(self, timeout)

    def active(self, timeout: float | None = None) -> AbstractContextManager[T]:
        """Use the value in a block, ``with handle.active() as value:``. The handle is suspended again if it was before.

        Blocks may be nested, and run in several threads: the first one resumes, and the last one suspends. For ``timeout`` and
        what is raised see :meth:`resume` and :meth:`suspend`.
        """
        return _active(self, timeout)

    @property
    def revision(self) -> int:
        """Return the number of the update in place that the memory has, from 0, plus two for each :meth:`Client.update`.

        It is odd while a process writes. Only the first look asks the server: the number is a word of shared memory. What is
        read after it is at least as new as that revision. Another generation is another object, and counts from 0.

        :raises StaleHandleError: if the handle was released, or the server is asked and does not own the object.
        """
        return self._need_page().revision

    def wait_revision(self, revision: int, timeout: float | None = None) -> int:
        """Wait until :attr:`revision` is at least ``revision``, and even; return it.

        ``handle.revision + 1`` waits for the end of the update that is under way, or of the next one. All that was written in
        the updates up to it is seen by what this thread reads, or queues on a GPU, after that.

        :param timeout: seconds to wait at most; None for no limit.
        :raises DeadlineExceeded: if the revision is not reached after ``timeout`` seconds.
        :raises UpdateInterrupted: if an update has begun and will not end, because its process was killed or its block raised.
        :raises StaleHandleError: as :attr:`revision`.
        """
        return self._need_page().wait(revision, _until(timeout))

    def read_consistent(self, function: Callable[[T], R], timeout: float | None = None) -> R:
        """Return ``function(handle.value)``, read from memory of one revision.

        An update under way is waited for, and if another one begins during the call, ``function`` is called again: it must have
        no other effects, and return nothing that is still in the memory, so ``clone()`` what is to be kept. What it queues on
        this thread's current stream is waited for. An exception is raised if no process wrote during the call.

        :param timeout: seconds after which ``function`` is not called again; None for no limit.
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

    def __enter__(self) -> Handle[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.release()

    async def __aenter__(self) -> Handle[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Async def endpoints give handles too, and a release may be a round trip.
        from anyio import CancelScope, to_thread

        with CancelScope(shield=True):
            await to_thread.run_sync(self.release)


class AsyncHandle(Lease[T]):
    """:class:`Handle` for coroutines: ``async with await client.call(...) as handle``. Its methods are to be awaited."""

    async def release(self) -> None:
        """Give the lease back and drop the value. Calling it again does nothing; it raises no error of its own."""
        if self._forgo():
            await self._issuer._aend_lease(self.object_id, self._session)

    async def get_object_info(self, refresh: bool = False) -> ObjectInfo:
        """Behave as :meth:`Handle.get_object_info`."""
        info: ObjectInfo = await self._issuer.get_object_info(self.object_id)
        return info

    async def is_stale(self) -> bool:
        """Behave as :meth:`Handle.is_stale`."""
        try:
            await self._issuer.ensure_handle_live(self)
        except StaleHandleError:
            return True
        return False

    async def is_current(self) -> bool:
        """Behave as :meth:`Handle.is_current`."""
        try:
            return not self._released and bool((await self._issuer.get_object_info(self.object_id))["current"])
        except StaleHandleError:
            return False

    async def latest(self) -> AsyncHandle[T]:
        """Behave as :meth:`Handle.latest`."""
        found: AsyncHandle[T] = await self._issuer.latest(self)
        return found

    async def ticket(self, path: str | os.PathLike[str] | None = None) -> Ticket:
        """Behave as :meth:`Handle.ticket`."""
        from anyio import to_thread

        self._check_held()
        socket_path = self._issuer.socket_path
        facts = await self.get_object_info()
        return await to_thread.run_sync(lambda: _issued(Ticket.of(facts, socket_path), path))

    async def suspend(self) -> None:
        """Behave as :meth:`Handle.suspend`."""
        await self._issuer.suspend(self)

    async def resume(self, timeout: float | None = None) -> None:
        """Behave as :meth:`Handle.resume`."""
        await self._issuer.resume(self, timeout)

    def active(self, timeout: float | None = None) -> AbstractAsyncContextManager[T]:
        """Behave as :meth:`Handle.active`: ``async with handle.active() as value:``."""
        return _active_async(self, timeout)

    @property
    def revision(self) -> Coroutine[Any, Any, int]:
        """Return :attr:`Handle.revision`: ``await handle.revision``. Only the first one waits for anything."""
        return self._revision()

    async def _revision(self) -> int:
        return (await self._need_page()).revision

    async def wait_revision(self, revision: int, timeout: float | None = None) -> int:
        """Behave as :meth:`Handle.wait_revision`."""
        page, until = await self._need_page(), _until(timeout)
        while (seen := await _in_thread(functools.partial(page.wait_slice, revision, until))) is None:
            continue
        return seen

    async def read_consistent(self, function: Callable[[T], R], timeout: float | None = None) -> R:
        """Behave as :meth:`Handle.read_consistent`. ``function`` is a plain one, called in a worker thread: there torch's
        current stream and its modes, as ``no_grad``, are the default ones.
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

    async def __aenter__(self) -> AsyncHandle[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        from anyio import CancelScope

        with CancelScope(shield=True):  # a cancelled block releases its lease too
            await self.release()


def _issued(ticket: Ticket, path: str | os.PathLike[str] | None) -> Ticket:
    if path is not None:
        ticket.write(path)
    return ticket


def forgone(handles: Iterable[Lease[Any] | str]) -> list[tuple[str, object]]:
    """Drop handles; return their object ids and sessions, without those released before. Ids are returned with None."""
    return [
        (handle, None) if isinstance(handle, str) else (handle.object_id, handle._session)
        for handle in handles
        if isinstance(handle, str) or handle._forgo()
    ]


def unreachable(server_id: str, error: Exception) -> StaleHandleError:
    """Return the error for a handle whose server cannot be asked."""
    return StaleHandleError(
        f"cannot reach the server {server_id}, which issued the handle: {error}", reason="server_unreachable"
    )


def _until(timeout: float | None) -> float:
    return time.monotonic() + timeout if timeout is not None else math.inf


@contextmanager
def _active(handle: Handle[T], timeout: float | None) -> Iterator[T]:
    handle._enter_block()
    try:
        handle._issuer._begin_block(handle, timeout)
        yield handle.value
    finally:
        handle._issuer._end_block(handle)


@asynccontextmanager
async def _active_async(handle: AsyncHandle[T], timeout: float | None) -> AsyncIterator[T]:
    from anyio import CancelScope

    handle._enter_block()
    try:
        await handle._issuer._begin_block(handle, timeout)
        yield handle.value
    finally:
        with CancelScope(shield=True):  # a cancelled block gives the memory up too
            await handle._issuer._end_block(handle)


@contextmanager
def updating(handle: Handle[T], timeout: float | None) -> Iterator[T]:
    """Behave as :meth:`shared_rpc.Client.update`."""
    value = handle.value
    with handle._need_page().update(_until(timeout)):
        yield value


@asynccontextmanager
async def updating_async(handle: AsyncHandle[T], timeout: float | None) -> AsyncIterator[T]:
    """Behave as :meth:`shared_rpc.AsyncClient.update`. The GPU is waited for in a thread, and by a cancelled block too."""
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
    """Run work in a thread of a limiter of its own; where the caller is cancelled, the thread goes on by itself."""
    from anyio import CapacityLimiter, to_thread

    return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=CapacityLimiter(1))
