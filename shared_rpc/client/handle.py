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
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from shared_rpc.errors import CapabilityError, HandleSuspended, StaleHandleError
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.revisions import Page
from shared_rpc.protocol.infos import ObjectInfo
from shared_rpc.protocol.ticket import Ticket

if TYPE_CHECKING:
    from anyio import CancelScope

T = TypeVar("T")
R = TypeVar("R")

#: Seconds for the server's answer to a release at the end of a block.
_CLOSING = 1.0


class Lease(Generic[T]):
    """A lease on an object of the server, and the object itself: the base of all handles."""

    def __init__(self, value: T, *, object_id: str, server_id: str, generation: int, issuer: Any, session: object) -> None:
        #: The object's id in the server.
        self.object_id = object_id
        #: The id of the server that owns the object.
        self.server_id = server_id
        #: The number of the build for the same cache key, from 1.
        self.generation = generation
        self._value = value
        #: The client or role that takes back the lease, with its public methods.
        self._issuer = issuer
        self._session = session
        self._released = False
        self._lock = threading.Lock()
        #: The object's revision page, None before its first use.
        self._page: Page | None = None
        #: True if it is suspended; True if it is to be outside of blocks that need it; and the number of such blocks.
        self._suspended = False
        self._resting = False
        self._blocks = 0
        #: True if this process has older memory than the server, see :meth:`_become_outdated`.
        self._outdated = False
        FINALIZER.start()

    @property
    def value(self) -> T:
        """The object, as returned by the endpoint.

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
        """True while the handle is suspended: it must be resumed before :attr:`value` is used.

        An active handle becomes suspended if its object was evicted while the session with the server was lost, and the new
        session could not map its present memory at once.
        """
        return (self._suspended or self._outdated) and not self._released

    @property
    def _inactive(self) -> bool:
        """True if this process has promised not to access the memory, so that it can be unmapped."""
        return self._suspended and not self._released

    @property
    def released(self) -> bool:
        """True once the lease was released."""
        return self._released

    def _check_held(self) -> None:
        if self._released:
            raise StaleHandleError(f"the handle of object {self.object_id} was released", reason="released")

    def in_session(self, session: object) -> bool:
        """Return True if the lease is in a session, and was not released."""
        return self._session is session and not self._released

    def move_to(self, session: object) -> bool:
        """Move the lease to another session; return False if it was released."""
        with self._lock:
            if not self._released:
                self._session = session
            return not self._released

    # States of a suspension, see shared_rpc.client.suspension.

    def _request_suspension(self) -> bool:
        """Request the suspension of the handle, outside of blocks; return True if it must be done now.

        :raises StaleHandleError: if it was released.
        """
        self._check_held()
        with self._lock:
            self._resting = True
            return not self._suspended and not self._blocks

    def _become_suspended(self) -> bool:
        """Become suspended, if that is still requested."""
        with self._lock:
            if self._released or self._blocks or not self._resting:
                return False
            self._suspended = True
            return True

    def _request_resumption(self) -> None:
        """Request the resumption of the handle.

        :raises StaleHandleError: if it was released.
        """
        self._check_held()
        self._resting = False

    def _become_active(self) -> None:
        """Become active, now that the memory is mapped."""
        with self._lock:
            self._suspended = self._outdated = False

    def _cancel_suspension(self) -> None:
        """Record that the handle could not be suspended, and that the end of a block must not retry."""
        with self._lock:
            self._suspended = self._resting = False

    def _become_outdated(self) -> None:
        """Become suspended while the old memory stays mapped: the server has replaced it."""
        self._outdated = True

    def _drop_value(self) -> None:
        """Drop the value, while the handle is suspended."""
        nothing: Any = None
        with self._lock:
            if self._suspended:
                self._value = nothing

    def _take(self, value: T) -> None:
        """Set the object's present value, before the handle becomes active."""
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
        """End such a block; return True if the handle must be suspended now."""
        with self._lock:
            self._blocks -= 1
            return self._resting and not (self._suspended or self._blocks or self._released)

    def _drop(self) -> bool:
        """Drop the value; return True if there is a lease to release."""
        with self._lock:
            if self._released:
                return False
            self._released = True
        # Not unmapped here: another thread may wait on the page.
        nothing: Any = None
        self._value = self._page = nothing
        return True

    def _return_soon(self) -> None:
        """Return the lease of a dropped handle in another thread."""
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
    client, and by any end of the process. Tensors taken from :attr:`value` stay valid after that: a
    mapping of this process holds their memory.
    """

    def release(self) -> None:
        """Release the lease and drop the value. Idempotent; raises no error of its own."""
        if self._drop():
            self._issuer._end_lease(self.object_id, self._session)

    def get_object_info(self, refresh: bool = False) -> ObjectInfo:
        """Query the server for its present description of the object.

        :param refresh: without effect, for code written for shared-tensor: answers are not cached.
        :raises StaleHandleError: if the server no longer owns the object.
        """
        info: ObjectInfo = self._issuer.get_object_info(self.object_id)
        return info

    def is_stale(self) -> bool:
        """Query whether the server that issued the handle has ended, or has dropped the object.

        :raises DeadlineExceeded: if the server does not answer within the client's timeout.
        """
        try:
            self._issuer.ensure_handle_live(self)
        except StaleHandleError:
            return True
        return False

    def is_current(self) -> bool:
        """Query whether the endpoint's next caller gets this very object.

        It is False once another generation is current or the object was invalidated, and for a stale handle. An object that is
        not cached has no generations: it is current while the server owns it.

        :raises ConnectError, ConnectionClosed: if the server does not answer.
        """
        try:
            return not self._released and bool(self._issuer.get_object_info(self.object_id)["current"])
        except StaleHandleError:
            return False

    def latest(self) -> Handle[T]:
        """Return a new handle of the current generation, which may be the same object.

        This handle is unchanged, and must be released like any other. Nothing is built, and the call does not wait.

        :raises StaleHandleError: if this handle is stale; with ``reason="invalidated"`` if no generation is current.
        """
        found: Handle[T] = self._issuer.latest(self)
        return found

    def ticket(self, path: str | os.PathLike[str] | None = None) -> Ticket:
        """Return a ticket, with which another process of this host and user gets the object by :meth:`Client.open_ticket`.

        A ticket is not a lease: until then the object must be cached, or held by some process.

        :param path: a file to write it to atomically, for this user alone (0600); None for no file.
        :raises StaleHandleError: if the server no longer owns the object.
        :raises CapabilityError: in the local role, where no other process can have the object.
        :raises ConfigurationError: if the file cannot be written.
        """
        self._check_held()
        socket_path = self._issuer.socket_path
        return _issued(Ticket.of(self.get_object_info(), socket_path), path)

    def suspend(self) -> None:
        """Unmap the object's memory in this process for a while; the handle keeps its lease.

        The process promises not to access tensors of :attr:`value` until :meth:`resume`: an access on the host ends it by
        SIGSEGV, a kernel's on a GPU breaks its context. Their addresses are kept, so that they, and CUDA graphs over them, are
        valid again then. Memory is unmapped when no handle of the object is active in this process, and it contains no part of
        another object; private copies of the process stay (``tensors="parameters"``, and written pages of arrays). Then the
        server may evict the object. In a block of :meth:`active` it takes effect at the block's end. A tensor that outlives its
        handle is unmapped too, while another handle of the object is suspended and none is active.

        Idempotent. Everything that does not access the memory works while it is suspended, such as :attr:`revision`,
        :meth:`latest` and :meth:`release`.

        In the process that ran the endpoint, as in the local role, the object is the endpoint's own result, which may have more
        references: nothing is unmapped, and the suspended handle drops its value instead. The resumed one has the same object
        again or, if it was evicted since, one over the restored memory; tensors taken from the earlier one keep the evicted
        memory.


        :raises StaleHandleError: if the lease has ended, so that the memory could not be restored. Nothing has changed then.
        :raises CapabilityError: if the memory cannot be mapped again at its address, like that of legacy CUDA IPC and of pools,
            or while a CUDA graph is captured. Nothing has changed then.
        """
        self._issuer.suspend(self)

    def resume(self, timeout: float | None = None) -> None:
        """Map the object's memory again, at its address: the server restores it first if it was evicted.

        Idempotent.

        :param timeout: maximum seconds to wait for capacity on the device; None for the client's own timeout.
        :raises ServerBusy: if the device had too little capacity until then; the message lists the users. The handle is still
            suspended, as after any error here.
        :raises DeadlineExceeded: if the time passed for another reason, such as the copy itself.
        :raises StaleHandleError: if the server no longer owns the object, or the lease has ended.
        :raises CapabilityError: if this process cannot map the memory now.
        """
        self._issuer.resume(self, timeout)

    def active(self, timeout: float | None = None) -> AbstractContextManager[T]:
        """Use the value in a block, ``with handle.active() as value:``. The handle is suspended again if it was before.

        Blocks may be nested, and run in several threads: the first one resumes, and the last one suspends. For ``timeout`` and
        errors see :meth:`resume` and :meth:`suspend`.
        """
        return _active(self, timeout)

    @property
    def revision(self) -> int:
        """The number of the memory's update in place, from 0, plus two for each :meth:`Client.update`.

        It is odd while a process writes. Only the first access queries the server: the number is a word of shared memory. Data
        read after it is at least as new as that revision. Another generation is another object, and counts from 0.

        :raises StaleHandleError: if the handle was released, or the server is queried and does not own the object.
        """
        return self._need_page().revision

    def wait_revision(self, revision: int, timeout: float | None = None) -> int:
        """Wait until :attr:`revision` is at least ``revision``, and even; return it.

        ``handle.revision + 1`` waits for the end of the active update, or of the next one. All writes of updates up to it are
        visible to this thread's reads, and to its work queued on a GPU, after that.

        :param timeout: maximum seconds to wait; None for no limit.
        :raises DeadlineExceeded: if the revision is not reached after ``timeout`` seconds.
        :raises UpdateInterrupted: if an update has begun and will not end, because its process was killed or its block raised.
        :raises StaleHandleError: like :attr:`revision`.
        """
        return self._need_page().wait(revision, _until(timeout))

    def read_consistent(self, function: Callable[[T], R], timeout: float | None = None) -> R:
        """Return ``function(handle.value)``, read from memory of one revision.

        An active update is waited for, and if another one begins during the call, ``function`` is called again: it must have no
        other effects, and return nothing that refers to the memory, so ``clone()`` tensors to keep. Its work queued on this
        thread's current stream is waited for. An exception is raised if no process wrote during the call.

        :param timeout: seconds after which ``function`` is not called again; None for no limit.
        :raises DeadlineExceeded, UpdateInterrupted, StaleHandleError: like :meth:`wait_revision`.
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
        # Async def endpoints return handles too, and a release may be a round trip.
        from anyio import CancelScope, to_thread

        with CancelScope(shield=True):
            await to_thread.run_sync(self.release)


class AsyncHandle(Lease[T]):
    """Like :class:`Handle`, with coroutine methods: ``async with await client.call(...) as handle``."""

    async def release(self) -> None:
        """Release the lease and drop the value. Idempotent; raises no error of its own."""
        if self._drop():
            await self._issuer._aend_lease(self.object_id, self._session)

    async def get_object_info(self, refresh: bool = False) -> ObjectInfo:
        """Behave like :meth:`Handle.get_object_info`."""
        info: ObjectInfo = await self._issuer.get_object_info(self.object_id)
        return info

    async def is_stale(self) -> bool:
        """Behave like :meth:`Handle.is_stale`."""
        try:
            await self._issuer.ensure_handle_live(self)
        except StaleHandleError:
            return True
        return False

    async def is_current(self) -> bool:
        """Behave like :meth:`Handle.is_current`."""
        try:
            return not self._released and bool((await self._issuer.get_object_info(self.object_id))["current"])
        except StaleHandleError:
            return False

    async def latest(self) -> AsyncHandle[T]:
        """Behave like :meth:`Handle.latest`."""
        found: AsyncHandle[T] = await self._issuer.latest(self)
        return found

    async def ticket(self, path: str | os.PathLike[str] | None = None) -> Ticket:
        """Behave like :meth:`Handle.ticket`."""
        from anyio import to_thread

        self._check_held()
        socket_path = self._issuer.socket_path
        facts = await self.get_object_info()
        return await to_thread.run_sync(lambda: _issued(Ticket.of(facts, socket_path), path))

    async def suspend(self) -> None:
        """Behave like :meth:`Handle.suspend`."""
        await self._issuer.suspend(self)

    async def resume(self, timeout: float | None = None) -> None:
        """Behave like :meth:`Handle.resume`."""
        await self._issuer.resume(self, timeout)

    def active(self, timeout: float | None = None) -> AbstractAsyncContextManager[T]:
        """Behave like :meth:`Handle.active`: ``async with handle.active() as value:``."""
        return _active_async(self, timeout)

    @property
    def revision(self) -> Coroutine[Any, Any, int]:
        """The same as :attr:`Handle.revision`: ``await handle.revision``. Only the first access waits."""
        return self._revision()

    async def _revision(self) -> int:
        return (await self._need_page()).revision

    async def wait_revision(self, revision: int, timeout: float | None = None) -> int:
        """Behave like :meth:`Handle.wait_revision`."""
        page, until = await self._need_page(), _until(timeout)
        while (seen := await _in_thread(functools.partial(page.wait_slice, revision, until))) is None:
            continue
        return seen

    async def read_consistent(self, function: Callable[[T], R], timeout: float | None = None) -> R:
        """Behave like :meth:`Handle.read_consistent`. ``function`` is no coroutine function, and is called in a worker thread:
        torch's current stream and its modes, such as ``no_grad``, are the default ones there.
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
        with closing_scope():
            await self.release()


def closing_scope() -> CancelScope:
    """Return a scope for the end of a block: a cancelled one releases its leases too, but does not wait for a stuck server."""
    from anyio import CancelScope, current_time

    return CancelScope(shield=True, deadline=current_time() + _CLOSING)


def _issued(ticket: Ticket, path: str | os.PathLike[str] | None) -> Ticket:
    if path is not None:
        ticket.write(path)
    return ticket


def drop_handles(handles: Iterable[Lease[Any] | str]) -> tuple[list[str], list[object]]:
    """Drop handles; return the object ids and sessions of those not released before. Ids are returned with None."""
    object_ids: list[str] = []
    sessions: list[object] = []
    for handle in handles:
        if isinstance(handle, str):
            object_ids.append(handle)
            sessions.append(None)
        elif handle._drop():
            object_ids.append(handle.object_id)
            sessions.append(handle._session)
    return object_ids, sessions


def unreachable(server_id: str, error: Exception) -> StaleHandleError:
    """Return the error for a handle whose server does not answer."""
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
        with CancelScope(shield=True):  # a cancelled block suspends again too
            await handle._issuer._end_block(handle)


@contextmanager
def updating(handle: Handle[T], timeout: float | None) -> Iterator[T]:
    """Behave like :meth:`shared_rpc.Client.update`."""
    value = handle.value
    with handle._need_page().update(_until(timeout)):
        yield value


@asynccontextmanager
async def updating_async(handle: AsyncHandle[T], timeout: float | None) -> AsyncIterator[T]:
    """Behave like :meth:`shared_rpc.AsyncClient.update`. A thread waits for the GPU, even if the block is cancelled."""
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
    """Run work in a thread of its own limiter; if the caller is cancelled, the thread continues."""
    from anyio import CapacityLimiter, to_thread

    return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=CapacityLimiter(1))
