"""Managed objects in the hands of their users."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from shared_rpc.errors import CapabilityError, SharedRPCError, StaleHandleError
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.revisions import Page
from shared_rpc.protocol.infos import ObjectInfo
from shared_rpc.protocol.ticket import Ticket

__all__ = ["AsyncHandle", "AsyncIssuer", "Handle", "Issuer", "Lease", "forgone", "unreachable", "updating", "updating_async"]

T = TypeVar("T")
R = TypeVar("R")


class Giver(Protocol):
    """Who takes a lease back."""

    @property
    def socket_path(self) -> str:
        """Where the server listens.

        :raises CapabilityError: if it is a process without one.
        """

    def _end_lease(self, object_id: str, session: object) -> None:
        """Give back one lease, from any thread. Raises no error of its own: where the session is gone, so is the lease."""


class Issuer(Giver, Protocol):
    """Who gave a :class:`Handle` out."""

    def _interrupted(self, session: object) -> None:
        """See to it that a lease goes back whose release a signal handler interrupted, wherever that was."""

    def get_object_info(self, handle: str, /) -> ObjectInfo:
        """See :meth:`Handle.get_object_info`."""

    def ensure_handle_live(self, handle: Handle[Any]) -> None:
        """See :meth:`shared_rpc.Client.ensure_handle_live`."""

    def latest(self, handle: Handle[T]) -> Handle[T]:
        """See :meth:`Handle.latest`."""

    def revision_page(self, object_id: str) -> Page:
        """Where the object's revision is.

        :raises StaleHandleError: if the server does not own the object.
        """


class AsyncIssuer(Giver, Protocol):
    """Who gave an :class:`AsyncHandle` out."""

    async def _aend_lease(self, object_id: str, session: object) -> None:
        """Do in a coroutine what :meth:`Giver._end_lease` does."""

    async def get_object_info(self, handle: str, /) -> ObjectInfo:
        """See :meth:`AsyncHandle.get_object_info`."""

    async def ensure_handle_live(self, handle: AsyncHandle[Any]) -> None:
        """See :meth:`shared_rpc.AsyncClient.ensure_handle_live`."""

    async def latest(self, handle: AsyncHandle[T]) -> AsyncHandle[T]:
        """See :meth:`AsyncHandle.latest`."""

    async def revision_page(self, object_id: str) -> Page:
        """See :meth:`Issuer.revision_page`."""


class Lease(Generic[T]):
    """A lease on an object of the server, and the object itself: what every handle is."""

    def __init__(self, value: T, *, object_id: str, server_id: str, generation: int, issuer: Any, session: object) -> None:
        #: By which the server, and whoever asks it, knows the object.
        self.object_id = object_id
        #: Of the server that owns the object.
        self.server_id = server_id
        #: Counts the builds of the same cache key, from 1.
        self.generation = generation
        self._value: T | None = value
        self._issuer: Giver = issuer
        self._session = session
        self._released = False
        self._lock = threading.Lock()
        #: Where its revision is, once somebody has asked.
        self._page: Page | None = None
        FINALIZER.start()

    @property
    def value(self) -> T:
        """The object: what the endpoint returned.

        :raises StaleHandleError: once it was released.
        """
        self._check_held()
        return self._value  # type: ignore[return-value]

    @property
    def released(self) -> bool:
        """Whether the lease was given back."""
        return self._released

    def _check_held(self) -> None:
        if self._released:
            raise StaleHandleError(f"the handle of object {self.object_id} was released", reason="released")

    def in_session(self, session: object) -> bool:
        """Whether its lease is in a session, and was not given back."""
        return self._session is session and not self._released

    def move_to(self, session: object) -> bool:
        """Its lease is in another session from here on; False if it was given back meanwhile."""
        with self._lock:
            if not self._released:
                self._session = session
            return not self._released

    def _forgo(self) -> bool:
        """Let go of the value; whether there is a lease to give back."""
        with self._lock:
            if self._released:
                return False
            self._released = True
        # Not unmapped here: another thread may be waiting for it.
        self._value = self._page = None
        return True

    def __reduce__(self) -> NoReturn:
        raise CapabilityError(
            f"the handle of object {self.object_id} cannot be pickled or copied, because its lease belongs to this process: "
            f"call the endpoint in the process that needs the object"
        )

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            self._released = True
            issuer, object_id, session = self._issuer, self.object_id, self._session
            FINALIZER.submit(lambda: issuer._end_lease(object_id, session))

    def __repr__(self) -> str:
        state = "released" if self._released else type(self._value).__name__
        return f"<{type(self).__name__} {self.object_id} generation {self.generation}: {state}>"


class Handle(Lease[T]):
    """A lease on an object of the server, and the object itself.

    The lease is given back by :meth:`release`, at the end of a ``with`` block, by garbage collection, by closing the
    client, and by the end of the process, however it comes. Tensors taken from :attr:`value` stay valid after that: a
    mapping of this process holds their memory.
    """

    _issuer: Issuer

    def release(self) -> None:
        """Give the lease back and let go of the value. Calling it again does nothing; it never raises an error of its own."""
        try:
            if self._forgo():
                self._issuer._end_lease(self.object_id, self._session)
        except BaseException:
            if self._released:
                self._issuer._interrupted(self._session)
            raise

    def get_object_info(self, refresh: bool = False) -> ObjectInfo:
        """Return what the server knows of the object now. Asks the server each time.

        :param refresh: without effect: nothing is remembered of an earlier answer. For code that was written for shared-tensor.
        :raises StaleHandleError: if the server does not own the object any more.
        """
        return self._issuer.get_object_info(self.object_id)

    def is_stale(self) -> bool:
        """Whether the server that issued the handle is gone or owns the object no more. Asks the server."""
        try:
            self._issuer.ensure_handle_live(self)
        except SharedRPCError:
            return True
        return False

    def is_current(self) -> bool:
        """Whether the endpoint's next caller gets this very object: False once another generation has taken its place, or it
        was invalidated, and for a stale handle. Asks the server.

        What is not cached has no generations: it is current for as long as it is there.

        :raises ConnectError, ConnectionClosed: if the server cannot be asked.
        """
        try:
            return not self._released and bool(self._issuer.get_object_info(self.object_id)["current"])
        except StaleHandleError:
            return False

    def latest(self) -> Handle[T]:
        """A new handle, of the generation that is current now. This one stays as it is, and is to be released as any other.

        Where this one is current still, it is another handle of the same object. Nothing is built, and nothing waited for.

        :raises StaleHandleError: if this handle is stale; with ``reason="invalidated"`` if no generation is current.
        """
        return self._issuer.latest(self)

    def ticket(self, path: str | os.PathLike[str] | None = None) -> Ticket:
        """A ticket for the object: what another process of this host and user opens with :meth:`Client.open_ticket`.

        It is no lease: the object must be cached, or held by somebody, until then.

        :param path: a file to write it to, whole or not at all, for this user alone (0600); None to write none.
        :raises StaleHandleError: if the server does not own the object any more.
        :raises CapabilityError: in the local role, where nobody else can have the object.
        :raises ConfigurationError: if the file cannot be written.
        """
        value, socket_path = self.value, self._issuer.socket_path
        return _issued(Ticket.of(value, self.get_object_info(), socket_path), path)

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

    def __enter__(self) -> Handle[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.release()

    async def __aenter__(self) -> Handle[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An async def endpoint gives handles too, and releasing one may be a round trip.
        from anyio import CancelScope, to_thread

        with CancelScope(shield=True):
            await to_thread.run_sync(self.release)


class AsyncHandle(Lease[T]):
    """What :class:`Handle` is, for coroutines: ``async with await client.call(...) as handle``."""

    _issuer: AsyncIssuer

    async def release(self) -> None:
        """Give the lease back and let go of the value. Calling it again does nothing; it never raises an error of its own."""
        if self._forgo():
            await self._issuer._aend_lease(self.object_id, self._session)

    async def get_object_info(self, refresh: bool = False) -> ObjectInfo:
        """See :meth:`Handle.get_object_info`."""
        return await self._issuer.get_object_info(self.object_id)

    async def is_stale(self) -> bool:
        """See :meth:`Handle.is_stale`."""
        try:
            await self._issuer.ensure_handle_live(self)
        except SharedRPCError:
            return True
        return False

    async def is_current(self) -> bool:
        """See :meth:`Handle.is_current`."""
        try:
            return not self._released and bool((await self._issuer.get_object_info(self.object_id))["current"])
        except StaleHandleError:
            return False

    async def latest(self) -> AsyncHandle[T]:
        """See :meth:`Handle.latest`."""
        return await self._issuer.latest(self)

    async def ticket(self, path: str | os.PathLike[str] | None = None) -> Ticket:
        """See :meth:`Handle.ticket`."""
        from anyio import to_thread

        value, socket_path = self.value, self._issuer.socket_path
        facts = await self.get_object_info()
        return await to_thread.run_sync(lambda: _issued(Ticket.of(value, facts, socket_path), path))

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

    async def __aenter__(self) -> AsyncHandle[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        from anyio import CancelScope

        with CancelScope(shield=True):  # a cancelled block gives its lease back too
            await self.release()


def _issued(ticket: Ticket, path: str | os.PathLike[str] | None) -> Ticket:
    if path is not None:
        ticket.write(path)
    return ticket


def forgone(handles: Iterable[Lease[Any] | str]) -> list[str]:
    """The object ids of handles that are let go of now, those that were released before left out; ids are taken as they are."""
    return [
        handle if isinstance(handle, str) else handle.object_id
        for handle in handles
        if isinstance(handle, str) or handle._forgo()
    ]


def unreachable(server_id: str, error: Exception) -> StaleHandleError:
    """The error for a handle whose server cannot be asked."""
    return StaleHandleError(
        f"the server {server_id} that issued the handle cannot be reached: {error}", reason="server_unreachable"
    )


def _until(timeout: float | None) -> float:
    return time.monotonic() + timeout if timeout is not None else math.inf


@contextmanager
def updating(handle: Handle[T], timeout: float | None) -> Iterator[T]:
    """See :meth:`shared_rpc.Client.update`."""
    value = handle.value
    with handle._need_page().update(_until(timeout)):
        yield value


@asynccontextmanager
async def updating_async(handle: AsyncHandle[T], timeout: float | None) -> AsyncIterator[T]:  # noqa: ASYNC109
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
