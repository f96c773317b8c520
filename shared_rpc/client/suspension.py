"""Suspended handles: when this process unmaps and maps memory, and the order of its reports to the server.

A handle is suspended or not. From all handles together follows:

- an object's memory is unmapped while no handle of it is active in the whole process, of any client;
- a suspension is reported to the server while no handle of it is active in the session, and not before the memory is unmapped.

The messages of a session arrive in the order of sending, but a thread may decide on one, and send it after that of another
thread. A resumption therefore waits for active suspensions of the object, and a suspension is not sent during a resumption.
Both sides publish before they check: a resumer adds its handle, then looks for a suspension; a suspender registers the
suspension, then looks for handles. So at least one sees the other.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.handle import Lease
from shared_rpc.client.sending import send
from shared_rpc.client.session import LeaseBook
from shared_rpc.client.steps import Driver, Operation, Pause, Reach, Reply, Request, Tell, Within, Work, query
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.errors import (
    CapabilityError,
    ConnectError,
    ConnectionClosed,
    ProtocolError,
    SharedRPCError,
    StaleHandleError,
    raised_by_handler,
)
from shared_rpc.forks import after_fork, fork_safe_lock
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol.records import SegmentInfo

_log = logging.getLogger("shared_rpc")

#: Seconds between two checks of an active suspension.
_MOMENT = 0.002


@contextmanager
def _announced(active: dict[object, str], object_id: str) -> Iterator[None]:
    key = object()
    try:
        active[key] = object_id
        yield
    finally:
        active.pop(key, None)


#: Suspended handles.
_suspended_handles: weakref.WeakSet[Lease[Any]] = weakref.WeakSet()
_lock = fork_safe_lock()
after_fork(_suspended_handles.clear)


def _has_active(object_id: str) -> bool:
    """Return True if a handle of the object may be used in this process."""
    return any(not handle._inactive for book in LeaseBook.all() for handle in book.of_object(object_id))


def _has_suspended(object_id: str) -> bool:
    """Return True if a handle of the object is suspended in this process."""
    if not _suspended_handles:
        return False
    with _lock:
        return object_id in [handle.object_id for handle in _suspended_handles if handle._inactive]


class Context(Driver):
    """The part of a driver that operations use: its session, and the values and handles of this process."""

    #: The session; None before the first one, and after the client was closed.
    _link: Any
    _closed: bool
    #: Values in this process, by object id: an object is rebuilt once, as it is built once in the server.
    _values: weakref.WeakValueDictionary[str, Any]
    _leases: LeaseBook
    #: True if suspended handles drop their values, because those are the endpoints' own.
    _drops_values: ClassVar[bool] = False

    @property
    @abstractmethod
    def socket_path(self) -> str:
        """The path of the server's socket."""

    def _reached(self) -> Operation[Any]:
        """Return the session, which has the ids of the server and of its device; connect if there is none."""
        return self._link if self._link is not None and not self._closed else (yield Reach())

    def _sent(
        self, kind: type[m.Call], endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], what: str, *, pooled: bool = False
    ) -> Operation[tuple[Reply, ClientTransfer | None]]:
        """Send a call of a kind; return the arguments of :func:`take_result`.

        :param pooled: True if its arguments and result may lie in pools.
        """
        return send(self._reached, kind, endpoint, args, kwargs, what, pooled=pooled)

    def _check_wait(self, request: Request) -> None:
        """Refuse a wait for an endpoint, ``request``, on the loop of the endpoints.

        An operation that waits in a later request checks this before its first one.

        :raises ConfigurationError: if this driver runs there.
        """

    def _end_lease(self, object_id: str, session: object) -> Operation[None]:
        """Release the lease of a dropped handle. Raises no error of its own."""
        if session is self._link:
            with suppress(SharedRPCError, OSError):  # the connection has ended, and the session's leases with it
                yield from release_leases(self, [object_id], [session])


def suspend_handle(ctx: Context, handle: Lease[Any]) -> Operation[None]:
    """Suspend a handle on request, unless a block needs it.

    :raises StaleHandleError: if the lease has ended, so that the memory could not be restored.
    :raises CapabilityError: if the memory cannot be unmapped, or not now. The handle is active then.
    """
    object_id = handle.object_id
    try:
        yield from query(m.GetObjectInfo(object_id), "suspend")
        if not handle._in_session(ctx._link):
            raise StaleHandleError(
                f"the handle of object {object_id} cannot be suspended: its lease has ended, or belongs to another process, "
                f"so its memory could not be restored",
                reason="released",
            )
    except BaseException:
        handle._cancel_suspension()
        raise
    with _lock:
        _suspended_handles.add(handle)
    yield from _settled(ctx, object_id, handle)


def _settled(ctx: Context, object_id: str, handle: Lease[Any] | None = None, *, waits: bool = True) -> Operation[None]:
    """Unmap memory that no active handle needs, and report it to the server.

    :param handle: the handle to suspend, which becomes active again if the memory cannot be unmapped.
    :param waits: True to wait for the server's confirmation.
    """
    with _announced(ctx._leases.suspending, object_id):
        if handle is not None and not handle._become_suspended():
            return
        yield Work(functools.partial(_unmapped, object_id, handle))
        if handle is not None and ctx._drops_values:
            handle._drop_value()
        if not ctx._leases.mark_reported(object_id):
            return
        if not waits:
            yield Tell(t.Suspend([object_id]))
            return
        with suppress(ConnectError, ConnectionClosed):  # the leases have ended; a session that takes them over begins with this
            yield from query(t.Suspend([object_id]), "suspend")


def _unmapped(object_id: str, handle: Lease[Any] | None) -> None:
    with MAPPINGS.changing:
        try:
            MAPPINGS.suspend(object_id, functools.partial(_has_active, object_id))
        except (CapabilityError, RuntimeError) as error:  # after others some of the memory may be unmapped
            if handle is not None and not raised_by_handler(error):
                handle._cancel_suspension()
            raise


def resume_handle(ctx: Context, handle: Lease[Any], timeout: float | None = None) -> Operation[None]:
    """Resume a handle, if it is suspended.

    :param timeout: seconds; None for the client's own.
    """
    if handle.suspended:
        if timeout is not None:
            yield Within(timeout)
        yield from map_again(ctx, handle)


def renew_handles(ctx: Context, handles: Iterable[Lease[Any]]) -> Operation[None]:
    """Map the current memory of objects in place of earlier incarnations, for active handles.

    Their session has taken the leases over from a lost one, as inactive ones. If the memory is not available now, the
    handles are suspended, and the mappings stay. Raises no error of its own.
    """
    left: dict[str, list[Lease[Any]]] = {}
    for handle in handles:
        left.setdefault(handle.object_id, []).append(handle)
    try:
        for object_id, [handle, *_] in tuple(left.items()):
            try:
                yield from _replaced(ctx, handle)
            except Exception as error:
                _mark_outdated(left.pop(object_id), str(error))
            else:
                del left[object_id]
    finally:
        for behind in left.values():
            _mark_outdated(behind, "the reconnecting request was interrupted")


def _replaced(ctx: Context, handle: Lease[Any]) -> Operation[None]:
    object_id = handle.object_id
    mapped = MAPPINGS.of_objects({object_id}).get(object_id, [])
    if not all(mapping.backend.replaces for mapping in mapped):
        raise CapabilityError(
            "the memory of a GPU is replaced by resume() alone, because no kernel may use it during that time"
        )
    written = any(mapping.info.access == "read_write" for mapping in mapped)
    yield from map_again(ctx, handle, activates=False)
    _log.log(
        logging.WARNING if written else logging.INFO,
        "object %s was evicted while the session with the server was lost: its current memory is mapped at its address%s",
        object_id,
        ", and what this process wrote to it since is lost" if written else "",
    )
    yield from lease_ended(ctx, [object_id])  # the handles may have been suspended since


def _mark_outdated(handles: Sequence[Lease[Any]], why: str) -> None:
    for handle in handles:
        handle._become_outdated()
    _log.warning(
        "object %s was evicted while the session with the server was lost, and its current memory cannot be mapped now: "
        "its handle is suspended until resume(). %s",
        handles[0].object_id,
        why,
    )


def map_again(ctx: Context, handle: Lease[Any], *, activates: bool = True) -> Operation[None]:
    """Map an object's memory again; with ``activates`` the handle becomes active."""
    book, object_id = ctx._leases, handle.object_id
    try:
        with _announced(book.resuming, object_id):
            until = time.monotonic() + PROMPT
            while object_id in tuple(book.suspending.values()) and time.monotonic() < until:
                yield Pause(_MOMENT)
            reply: Reply = yield Request(t.Resume(object_id), f"the resumption of object {object_id}")
            try:
                if reply.live:
                    handle._take(reply.value)
                yield Work(functools.partial(_mapped, book, object_id, reply, handle if activates else None))
            finally:
                reply.frame.close()
    except GeneratorExit:
        raise
    except BaseException as error:
        if not isinstance(error, Exception):  # cancelled or interrupted: this must not wait
            if book.mark_reported(object_id):
                yield Tell(t.Suspend([object_id]))
        elif _has_suspended(object_id):
            yield from _settled(ctx, object_id, waits=False)  # the caller's time may be over
        raise


def _mapped(book: LeaseBook, object_id: str, reply: Reply, handle: Lease[Any] | None) -> None:
    message = reply.message
    if not isinstance(message, t.Resumed) or len(reply.frame.fds) != len(message.segments):
        raise ProtocolError(f"the server answered Resume with {type(message).__name__}, not with Resumed and its descriptors")
    segments = Segment.received(message.segments, reply.frame)

    def activate() -> None:
        if handle is not None:
            handle._become_active()
        book.reported.discard(object_id)

    try:
        MAPPINGS.resume(object_id, segments, message.owner, activate)
    finally:
        for segment in segments:
            segment.close()


def release_leases(ctx: Context, object_ids: list[str], sessions: Sequence[object], *, waits: bool = True) -> Operation[int]:
    """Release leases in one round trip; return the number of those that this process held.

    :param sessions: the session of each lease, or None.
    :param waits: False for a message in the leases' session without a wait for the server, which returns 0.
    """
    count = 0
    if object_ids and waits:
        count = yield from query(m.Release(object_ids), "release", sessions=sessions)
    elif object_ids:
        yield Tell(m.Release(object_ids))
    yield from lease_ended(ctx, object_ids, waits=waits)
    if waits and MAPPINGS.has_unused:  # for a GPU this waits for the device
        yield Work(MAPPINGS.drain)
    return count


def lease_ended(ctx: Context, object_ids: Iterable[str], *, waits: bool = True) -> Operation[None]:
    """Settle an object after the end of a lease, if only suspended handles, or none, are left; ``waits``: for the server."""
    book = ctx._leases
    for object_id in object_ids:
        if _has_suspended(object_id):
            yield from _settled(ctx, object_id, waits=waits)
        elif object_id in book.reported and not book.of_object(object_id):
            book.reported.discard(object_id)


def outdated(object_id: str, infos: Iterable[SegmentInfo]) -> bool:
    """Return True if a value here lies in memory replaced by the server, and no operation is renewing it."""
    return object_id not in MAPPINGS.suspended and MAPPINGS.outdated(infos)
