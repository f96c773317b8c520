"""Handles: a lease on an object of a server, with the operations on it."""

from __future__ import annotations

import functools
import math
import operator
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, overload

from shared_rpc.client.handle import Lease, closing_scope
from shared_rpc.client.steps import BlockingMethods, CoroutineMethods, Operation, Work
from shared_rpc.client.suspension import resume_handle, suspend_handle
from shared_rpc.errors import StaleHandleError
from shared_rpc.operations.binding import Leased, Steps, Unbound, bound, operation

if TYPE_CHECKING:
    from shared_rpc.memory.revisions import Page
    from shared_rpc.protocol.infos import ObjectInfo
    from shared_rpc.protocol.ticket import Ticket

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class lending(Unbound[P, Leased[T]], Generic[P, T]):
    """A public operation that returns a handle."""

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: BlockingMethods, kind: type) -> Callable[P, Handle[T]]: ...
    @overload
    def __get__(self, owner: CoroutineMethods, kind: type) -> Callable[P, Coroutine[Any, Any, AsyncHandle[T]]]: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        return self


class HandleOperations(Lease[T]):
    """The operations of a handle, which the driver of its client executes."""

    #: Without a call in between: a release is as fast as any other operation.
    _run: Any = property(operator.attrgetter("_issuer._run"))

    @operation
    def release(self) -> Steps[None]:
        """Release the lease and drop the value. Idempotent; raises no error of its own."""
        if self._drop():
            yield from self._issuer._end_lease(self.object_id, self._session)

    @operation
    def get_object_info(self, refresh: bool = False) -> Steps[ObjectInfo]:
        """Return the server's current description of the object.

        :param refresh: without effect, for code written for shared-tensor: answers are not cached.
        :raises StaleHandleError: if the server no longer owns the object.
        """
        info: ObjectInfo = yield from self._of_issuer("get_object_info", self.object_id)
        return info

    @operation
    def is_stale(self) -> Steps[bool]:
        """Query whether the server that issued the handle has ended, or has dropped the object.

        :raises DeadlineExceeded: if the server does not answer within the client's timeout.
        """
        try:
            yield from self._of_issuer("ensure_handle_live", self)
        except StaleHandleError:
            return True
        return False

    @operation
    def is_current(self) -> Steps[bool]:
        """Query whether the endpoint's next caller gets this very object.

        It is False once another generation is current or the object was invalidated, and for a stale handle. An object that is
        not cached has no generations: it is current while the server owns it.

        :raises ConnectError, ConnectionClosed: if the server does not answer.
        """
        try:
            return not self._released and bool((yield from self._of_issuer("get_object_info", self.object_id))["current"])
        except StaleHandleError:
            return False

    @lending
    def latest(self) -> Steps[Leased[T]]:
        """Return a new handle of the current generation, which may be the same object.

        This handle is unchanged, and must be released like any other. Nothing is built, and the call does not wait.

        :raises StaleHandleError: if this handle is stale; with ``reason="invalidated"`` if no generation is current.
        """
        found: Leased[T] = yield from self._of_issuer("latest", self)
        return found

    @operation
    def ticket(self, path: str | os.PathLike[str] | None = None) -> Steps[Ticket]:
        """Return a ticket, with which another process of this host and user gets the object by :meth:`Client.open_ticket`.

        A ticket is not a lease: until then the object must be cached, or held by some process.

        :param path: a file to write it to atomically, for this user alone (0600); None for no file.
        :raises StaleHandleError: if the server no longer owns the object.
        :raises CapabilityError: in the local role, where no other process can have the object.
        :raises ConfigurationError: if the file cannot be written.
        """
        from shared_rpc.protocol.ticket import Ticket

        self._check_held()
        socket_path = self._issuer.socket_path
        ticket = Ticket.of((yield from self._of_issuer("get_object_info", self.object_id)), socket_path)
        if path is not None:
            yield Work(functools.partial(ticket.write, path))
        return ticket

    @operation
    def suspend(self) -> Steps[None]:
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
        yield from self._of_issuer("suspend", self)

    @operation
    def resume(self, timeout: float | None = None) -> Steps[None]:
        """Map the object's memory again, at its address: the server restores it first if it was evicted.

        Idempotent.

        :param timeout: maximum seconds to wait for capacity on the device; None for the client's own timeout.
        :raises ServerBusy: if the device had too little capacity until then; the message lists the users. The handle is still
            suspended, as after any error here.
        :raises DeadlineExceeded: if the time passed for another reason, such as the copy itself.
        :raises StaleHandleError: if the server no longer owns the object, or the lease has ended.
        :raises CapabilityError: if this process cannot map the memory now.
        """
        yield from self._of_issuer("resume", self, timeout)

    @operation
    def wait_revision(self, revision: int, timeout: float | None = None) -> Steps[int]:
        """Wait until :attr:`revision` is at least ``revision``, and even; return it.

        ``handle.revision + 1`` waits for the end of the active update, or of the next one. All writes of updates up to it are
        visible to this thread's reads, and to its work queued on a GPU, after that.

        :param timeout: maximum seconds to wait; None for no limit.
        :raises DeadlineExceeded: if the revision is not reached after ``timeout`` seconds.
        :raises UpdateInterrupted: if an update has begun and will not end, because its process was killed or its block raised.
        :raises StaleHandleError: like :attr:`revision`.
        """
        until, seen = until_of(timeout), None
        page = yield from self._paged()
        while seen is None:
            seen = yield Work(functools.partial(page.wait_slice, revision, until), waits=True)
        return int(seen)

    def _of_issuer(self, name: str, *arguments: Any) -> Operation[Any]:
        """Return an operation of the client, as a part of one of this handle."""
        return getattr(self._issuer, name)._body(self._issuer, *arguments)  # type: ignore[no-any-return]

    def _paged(self) -> Operation[Page]:
        if self._page is None:
            self._check_held()
            self._page = yield from self._of_issuer("revision_page", self.object_id)
        return self._page


class Handle(HandleOperations[T], BlockingMethods):
    """A lease on an object of the server, and the object itself.

    The lease is released by :meth:`release`, at the end of a ``with`` block, by garbage collection, by closing the
    client, and by any end of the process. Tensors taken from :attr:`value` stay valid after that: a
    mapping of this process holds their memory.
    """

    @contextmanager
    def active(self, timeout: float | None = None) -> Iterator[T]:
        """Use the value in a block, ``with handle.active() as value:``. The handle is suspended again if it was before.

        Blocks may be nested, and run in several threads: the first one resumes, and the last one suspends. For ``timeout`` and
        errors see :meth:`resume` and :meth:`suspend`.
        """
        self._enter_block()
        try:
            self._run(resume_handle(self._issuer, self, timeout))
            yield self.value
        finally:
            if self._leave_block():
                self._run(suspend_handle(self._issuer, self))

    @property
    def revision(self) -> int:
        """The number of the memory's update in place, from 0, plus two for each :meth:`Client.update`.

        It is odd while a process writes. Only the first access queries the server: the number is a word of shared memory. Data
        read after it is at least as new as that revision. Another generation is another object, and counts from 0.

        :raises StaleHandleError: if the handle was released, or the server is queried and does not own the object.
        """
        return self._need_page().revision

    def read_consistent(self, function: Callable[[T], R], timeout: float | None = None) -> R:
        """Return ``function(handle.value)``, read from memory of one revision.

        An active update is waited for, and if another one begins during the call, ``function`` is called again: it must have no
        other effects, and return nothing that refers to the memory, so ``clone()`` tensors to keep. Its work queued on this
        thread's current stream is waited for. An exception is raised if no process wrote during the call.

        :param timeout: seconds after which ``function`` is not called again; None for no limit.
        :raises DeadlineExceeded, UpdateInterrupted, StaleHandleError: like :meth:`wait_revision`.
        """
        value = self.value
        return self._need_page().read(function, value, until_of(timeout))

    def _need_page(self) -> Page:
        return self._page or self._run(self._paged())

    def __enter__(self) -> Handle[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class AsyncHandle(HandleOperations[T], CoroutineMethods):
    """Like :class:`Handle`, with coroutine methods: ``async with await client.call(...) as handle``."""

    @asynccontextmanager
    async def active(self, timeout: float | None = None) -> AsyncIterator[T]:
        """Behave like :meth:`Handle.active`: ``async with handle.active() as value:``."""
        from anyio import CancelScope

        self._enter_block()
        try:
            await self._run(resume_handle(self._issuer, self, timeout))
            yield self.value
        finally:
            if self._leave_block():
                with CancelScope(shield=True):  # a cancelled block suspends again too
                    await self._run(suspend_handle(self._issuer, self))

    @property
    def revision(self) -> Coroutine[Any, Any, int]:
        """The same as :attr:`Handle.revision`: ``await handle.revision``. Only the first access waits."""
        return self._revision()

    async def _revision(self) -> int:
        return (await self._need_page()).revision

    async def read_consistent(self, function: Callable[[T], R], timeout: float | None = None) -> R:
        """Behave like :meth:`Handle.read_consistent`. ``function`` is no coroutine function, and is called in a worker thread:
        torch's current stream and its modes, such as ``no_grad``, are the default ones there.
        """
        value, until = self.value, until_of(timeout)
        page = await self._need_page()
        return await in_thread(functools.partial(page.read, function, value, until))

    async def _need_page(self) -> Page:
        return self._page or await self._run(self._paged())

    async def __aenter__(self) -> AsyncHandle[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        with closing_scope():
            await self.release()


BlockingMethods._HANDLE, CoroutineMethods._HANDLE = Handle, AsyncHandle
bound(Handle)
bound(AsyncHandle)


def until_of(timeout: float | None) -> float:
    """Return the end of a time from now on, on the clock of time.monotonic()."""
    return time.monotonic() + timeout if timeout is not None else math.inf


async def in_thread(work: Callable[[], R]) -> R:
    """Run work in a thread, under a separate limiter; if the caller is cancelled, the thread continues."""
    from anyio import CapacityLimiter, to_thread

    return await to_thread.run_sync(work, abandon_on_cancel=True, limiter=CapacityLimiter(1))
