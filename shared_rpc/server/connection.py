"""One connection: what a client asks, and what it is answered."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from shared_rpc.errors import (
    CapabilityError,
    ConnectionClosed,
    DeadlineExceeded,
    ProtocolError,
    ServerBusy,
    SharedRPCError,
)
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.records import Arguments
from shared_rpc.server.core import Core
from shared_rpc.server.outcomes import Failure
from shared_rpc.server.runs import Delivery, Waiter
from shared_rpc.server.sessions import Session, Sessions
from shared_rpc.transport import FrameSocket, Peer
from shared_rpc.wire import messages as m
from shared_rpc.wire.frames import Frame
from shared_rpc.wire.messages import decode_message
from shared_rpc.wire.tasks import TaskInfo
from shared_rpc.wire.values import decode_call

__all__ = ["Connection"]

_log = logging.getLogger("shared_rpc.server")

#: Seconds a new connection has for its first frame.
_HANDSHAKE_TIMEOUT = 10.0
#: Bytes of replies a client may leave unread before the server stops reading its requests.
_BACKPRESSURE = 1 << 20
#: Calls of one connection that may be under way at once; each costs the server some kilobytes.
_MAX_CALLS = 10_000
#: Tasks that one page lists.
_PAGE = 1000
#: Reads of one connection after which the others have their turn, and requests that are answered in one write.
_TURN = 32


async def _until(ready: Callable[[socket.socket], Awaitable[None]], sock: socket.socket) -> None:
    try:
        await ready(sock)
    except (anyio.ClosedResourceError, OSError, ValueError) as error:
        raise ConnectionClosed(f"the connection was closed: {error}") from error


class Connection:
    """One connection: reads requests, answers them, in whatever order they end."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        core: Core,
        sessions: Sessions,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self.peer = peer
        self.session: Session | None = None
        self._socket = FrameSocket(sock)
        self._core = core
        self._sessions = sessions
        self._facts = facts
        self._waiters: dict[int, Waiter] = {}
        self._drained: asyncio.Event | None = None
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._gathering = False
        self._closed = False

    async def run(self) -> None:
        """Serve until the other side goes away or breaks the protocol. Never raises on its account."""
        try:
            with anyio.fail_after(_HANDSHAKE_TIMEOUT):
                self._welcome(await self._next_frame())
            while True:
                for _ in range(_TURN):
                    self._handle_all(await self._next_frame())
                    if self._drained is not None and self._socket.unsent > _BACKPRESSURE:
                        await self._drained.wait()
                await anyio.lowlevel.checkpoint()
        except ConnectionClosed:
            pass
        except TimeoutError:
            _log.warning("pid %d connected and said nothing for %g s", self.peer.pid, _HANDSHAKE_TIMEOUT)
        except ProtocolError as error:
            _log.warning("pid %d broke the protocol: %s", self.peer.pid, error)
            self._reply(0, m.Error(error.code, str(error)))
        finally:
            self.close()

    def close(self) -> None:
        """End the connection now: its calls are left, what it waited for is not told any more."""
        if self._closed:
            return
        self._closed = True
        for waiter in self._waiters.values():
            self._core.leave(waiter)
        self._waiters.clear()
        anyio.notify_closing(self._socket.sock)
        self._socket.close()
        self._sessions.leave(self)

    def refuse(self, error: SharedRPCError) -> None:
        """Tell the other side why it is turned away, and end."""
        self._reply(0, m.Error(error.code, str(error)))
        self.close()

    def abandon(self) -> None:
        """Close the descriptors and nothing else: this is a forked child, and the connection is its parent's."""
        self._socket.close()

    def _handle_all(self, frame: Frame | None) -> None:
        """Handle a frame and those that came with it. What can be answered at once goes back in one write."""
        self._gathering = True
        try:
            for _ in range(_TURN):
                if frame is None or self._closed or self._socket.unsent > _BACKPRESSURE:
                    break
                self._handle(frame)
                frame = self._socket.next_frame()
            if frame is not None:
                self._handle(frame)
        finally:
            self._gathering = False
            self._flush()

    async def _next_frame(self) -> Frame:
        while (frame := self._socket.next_frame()) is None:
            try:
                self._socket.receive()
            except BlockingIOError:
                await _until(anyio.wait_readable, self._socket.sock)
        return frame

    async def _drain(self) -> None:
        """Write what a reply could not write at once."""
        try:
            while not self._socket.flush():
                await _until(anyio.wait_writable, self._socket.sock)
        except ConnectionClosed:
            pass  # the reading side sees it too, and ends the connection
        finally:
            drained, self._drained = self._drained, None
            if drained is not None:
                drained.set()

    def _reply(self, request_id: int, message: m.Message, payload: bytes = b"", fds: tuple[int, ...] = ()) -> bool:
        """Queue a reply, and write as much as goes at once. Never waits, never raises; False if an error went instead."""
        if self._closed:
            return False
        sent = True
        try:
            self._socket.queue(message, request_id, payload, fds)
        except (OSError, ProtocolError) as error:
            _log.error("a reply to pid %d cannot be sent: %s", self.peer.pid, error)
            text = f"the server cannot send the reply: {error}"
            self._socket.queue(m.Error(CapabilityError.code, text), request_id)
            sent = False
        if not self._gathering:
            self._flush()
        return sent

    def _flush(self) -> None:
        # Where the connection broke, the reading side sees it too, and ends it.
        with suppress(ConnectionClosed):
            if not self._closed and self._drained is None and not self._socket.flush():
                self._drained = asyncio.Event()
                # Not a task of anyio's: a reply may come from a callback of the loop, where anyio knows no task to belong to.
                self._draining = self._loop.create_task(self._drain())

    def _welcome(self, frame: Frame) -> None:
        try:
            hello = decode_message(frame)
        finally:
            frame.close()
        if not isinstance(hello, m.Hello):
            raise ProtocolError(f"a connection begins with Hello, not with {type(hello).__name__}")
        self.session = self._sessions.join(self, hello.token)
        welcome = m.Welcome(self._core.server_id, self.session.token, os.getpid(), self._core.device)
        self._reply(frame.request_id, welcome)

    def _handle(self, frame: Frame) -> None:
        try:
            message = decode_message(frame)
            handler = _HANDLERS.get(type(message))
            if handler is None:
                raise ProtocolError(f"{type(message).__name__} is no request")
            handler(self, frame, message)
        except (SharedRPCError, TypeError) as error:
            self._fail(frame.request_id, Failure.of(error))
        except Exception as error:
            _log.exception("a request of pid %d could not be handled", self.peer.pid)
            self._fail(frame.request_id, Failure.of(error))
        finally:
            frame.close()

    def _fail(self, request_id: int, failure: Failure) -> None:
        self._reply(
            request_id,
            m.Error(failure.code, failure.text, failure.detail, endpoint_raised=bool(failure.pickled)),
            failure.pickled,
        )

    def _ping(self, frame: Frame, message: m.Ping) -> None:
        self._reply(frame.request_id, m.Pong())

    def _server_info(self, frame: Frame, message: m.GetServerInfo) -> None:
        self._reply(frame.request_id, m.Facts(self._facts()))

    def _list_endpoints(self, frame: Frame, message: m.ListEndpoints) -> None:
        self._reply(frame.request_id, m.Endpoints(self._core.registry.all()))

    def _call(self, frame: Frame, message: m.Call) -> None:
        waiter = self._waiter(frame.request_id)
        arguments = _arguments_of(frame, message)
        self._waiters[frame.request_id] = waiter
        self._core.call(waiter, message.endpoint, (arguments.args, arguments.kwargs), arguments)

    def _submit(self, frame: Frame, message: m.Submit) -> None:
        arguments = _arguments_of(frame, message)
        info = self._core.submit(message.endpoint, (arguments.args, arguments.kwargs), arguments)
        self._reply(frame.request_id, m.TaskIs(info))

    def _wait_task(self, frame: Frame, message: m.WaitTask) -> None:
        waiter = self._waiter(frame.request_id)
        if message.events:
            waiter.on_event = lambda info: self._tell_of_task(frame.request_id, info)
        if message.look:
            waiter.looks, waiter.claims = True, message.claim
            waiter.deliver = lambda outcome: self._show_task(frame.request_id, message.task_id, outcome)
        self._waiters[frame.request_id] = waiter
        try:
            self._core.tasks.wait(waiter, message.task_id, poll=message.poll)
        except BaseException:
            del self._waiters[frame.request_id]
            raise

    def _show_task(self, request_id: int, task_id: str, outcome: Delivery | Failure) -> None:
        self._waiters.pop(request_id, None)
        if self._core.stopped and isinstance(outcome, Failure):
            self._fail(request_id, outcome)  # there will be nobody to ask for more
        else:
            self._reply(request_id, m.TaskIs(self._core.tasks.table.get(task_id).info))

    def _fetch_task(self, frame: Frame, message: m.FetchTask) -> None:
        waiter = self._waiter(frame.request_id)
        self._core.tasks.fetch(waiter, message.task_id, message.claimed)

    def _waiter(self, request_id: int) -> Waiter:
        assert self.session is not None, "a request before the handshake"
        if request_id in self._waiters:
            raise ProtocolError(f"request id {request_id} is in use")
        if len(self._waiters) >= _MAX_CALLS:
            raise ServerBusy(f"{_MAX_CALLS} calls of this connection are under way: wait for some of them to end")
        return Waiter(self.session.session_id, lambda outcome: self._deliver(request_id, outcome))

    def _tell_of_task(self, request_id: int, info: TaskInfo) -> None:
        # One who does not read misses how it went, and not how it ends.
        if self._socket.unsent <= _BACKPRESSURE:
            self._reply(request_id, m.TaskChanged(info))

    def _deliver(self, request_id: int, outcome: Delivery | Failure) -> None:
        self._waiters.pop(request_id, None)
        if isinstance(outcome, Failure):
            self._fail(request_id, outcome)
            return
        record, stored = outcome.record, outcome.stored
        assert record is not None, "a call from another process needs a record"
        message = m.Result(
            object_id=stored.object_id if stored is not None else "",
            generation=stored.generation if stored is not None else 1,
            managed=outcome.managed,
            table=msgspec.Raw(record.table),
            segments=[segment.info for segment in record.segments],
        )
        fds = tuple(segment.fileno() for segment in record.segments)
        if not self._reply(request_id, message, record.skeleton, fds) and outcome.managed and self.session is not None:
            self._core.release(self.session.session_id, [message.object_id])

    def _cancel(self, frame: Frame, message: m.Cancel) -> None:
        waiter = self._waiters.pop(frame.request_id, None)
        if waiter is not None:  # else its reply is on the way
            self._core.leave(waiter)
            self._reply(frame.request_id, m.Error(DeadlineExceeded.code, "the call was given up by its caller"))

    def _get_task(self, frame: Frame, message: m.GetTask) -> None:
        self._reply(frame.request_id, m.TaskIs(self._core.tasks.table.get(message.task_id).info))

    def _list_tasks(self, frame: Frame, message: m.ListTasks) -> None:
        limit = min(max(message.limit, 1), _PAGE)
        self._reply(frame.request_id, m.TaskPage(*self._core.tasks.table.page(message.status, message.after, limit)))

    def _cancel_task(self, frame: Frame, message: m.CancelTask) -> None:
        task = self._core.tasks.table.get(message.task_id)
        self._reply(frame.request_id, m.Count(int(self._core.tasks.cancel(task))))

    def _release(self, frame: Frame, message: m.Release) -> None:
        assert self.session is not None, "a request before the handshake"
        self._reply(frame.request_id, m.Count(self._core.release(self.session.session_id, message.object_ids)))

    def _object_info(self, frame: Frame, message: m.GetObjectInfo) -> None:
        self._reply(frame.request_id, m.Facts(self._core.object_info(message.object_id)))

    def _list_objects(self, frame: Frame, message: m.ListObjects) -> None:
        items = [
            self._core.facts(stored) | {"cached": stored.listed, "holders": self._sessions.holders(stored.object_id)}
            for stored in self._core.objects
        ]
        self._reply(frame.request_id, m.FactsList(items))

    def _invalidate_call(self, frame: Frame, message: m.InvalidateCall) -> None:
        args, kwargs = decode_call(message.args, message.kwargs)
        self._reply(frame.request_id, m.Count(self._core.invalidate_call(message.endpoint, args, kwargs)))

    def _invalidate_endpoint(self, frame: Frame, message: m.InvalidateEndpoint) -> None:
        self._reply(frame.request_id, m.Count(self._core.invalidate_endpoint(message.endpoint)))


def _arguments_of(frame: Frame, message: m.Call) -> Arguments:
    """The arguments of a call. They own the frame's descriptors from here on."""
    args, kwargs = decode_call(message.args, message.kwargs)
    if (
        len(message.segments) != len(frame.fds)
        or sum(message.skeletons) != len(frame.payload)
        or min(message.skeletons, default=0) < 0
    ):
        raise ProtocolError("a call whose descriptors or skeletons do not match its message")
    # Their ids are made here, so that no client can pass its memory off as another segment.
    infos = [msgspec.structs.replace(info, id=new_segment_id()) for info in message.segments]
    segments = [Segment(info, fd) for info, fd in zip(infos, frame.take_fds(), strict=True)]
    skeletons, start = [], 0
    for size in message.skeletons:
        skeletons.append(frame.payload[start : start + size])
        start += size
    return Arguments(args, kwargs, bytes(message.table), skeletons, segments)


_HANDLERS: dict[type[m.Message], Callable[[Connection, Frame, Any], None]] = {
    m.Ping: Connection._ping,
    m.GetServerInfo: Connection._server_info,
    m.ListEndpoints: Connection._list_endpoints,
    m.Call: Connection._call,
    m.Cancel: Connection._cancel,
    m.Release: Connection._release,
    m.GetObjectInfo: Connection._object_info,
    m.ListObjects: Connection._list_objects,
    m.InvalidateCall: Connection._invalidate_call,
    m.InvalidateEndpoint: Connection._invalidate_endpoint,
    m.Submit: Connection._submit,
    m.GetTask: Connection._get_task,
    m.WaitTask: Connection._wait_task,
    m.FetchTask: Connection._fetch_task,
    m.ListTasks: Connection._list_tasks,
    m.CancelTask: Connection._cancel_task,
}
