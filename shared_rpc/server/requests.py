"""What a client may ask, and how it is answered."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from shared_rpc.errors import ConfigurationError, DeadlineExceeded, ProtocolError, ServerBusy, SharedRPCError
from shared_rpc.observability.events import HOOKS, RequestFailed
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import decode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.tasks import TaskInfo
from shared_rpc.protocol.values import decode_call
from shared_rpc.server.arguments import ArgumentReader
from shared_rpc.server.core import Core
from shared_rpc.server.generation_requests import GENERATION_HANDLERS, GenerationRequests
from shared_rpc.server.monitoring_requests import MONITORING_HANDLERS, MonitoringRequests
from shared_rpc.server.outcomes import Failure
from shared_rpc.server.runs import Delivery, Waiter
from shared_rpc.server.session_lanes import SessionLane
from shared_rpc.server.sessions import Sessions

if TYPE_CHECKING:
    from shared_rpc.server.connection import Connection

__all__ = ["Requests"]

_log = logging.getLogger("shared_rpc.server")

#: Calls of one connection that may be under way at once; each costs the server some kilobytes.
_MAX_CALLS = 10_000
#: Characters of an error's text for those who listen.
_SHOWN = 500
#: Tasks that one page lists.
_PAGE = 1000


class Requests(GenerationRequests, MonitoringRequests):
    """The requests of one connection. Those that are not answered at once are waiters of the core."""

    def __init__(self, connection: Connection, core: Core, sessions: Sessions, facts: Callable[[], dict[str, Any]]) -> None:
        self._connection = connection
        self._reply = connection.reply
        self._core = core
        self._sessions = sessions
        self._facts = facts
        self._arguments = ArgumentReader(core, connection)
        self._waiters: dict[int, Waiter] = {}
        #: Arenas of the session's pool whose descriptors went over this connection.
        self._sent: set[str] = set()
        #: Of calls whose result waits for memory: why.
        self._starved: dict[int, str] = {}

    @property
    def _lane(self) -> SessionLane:
        return self._core.lanes.of(self._connection.session_id)

    def close(self) -> None:
        """The connection ended: its calls are left, and nobody is told of them any more."""
        for waiter in self._waiters.values():
            self._leave(waiter)
        self._waiters.clear()

    def handle(self, frame: Frame) -> None:
        """Answer a request, now or later. Never raises."""
        try:
            message = decode_message(frame)
            handler = _HANDLERS.get(type(message))
            if handler is None:
                raise ProtocolError(f"{type(message).__name__} is no request")
            handler(self, frame, message)
        except (SharedRPCError, TypeError) as error:
            self._fail(frame.request_id, Failure.of(error))
        except Exception as error:
            _log.exception("a request of pid %d could not be handled", self._connection.peer.pid)
            self._fail(frame.request_id, Failure.of(error))
        finally:
            frame.close()

    def _name(self, request_id: int) -> str:
        """What tells a request from all others: by it a client's error is found in the server's log."""
        return f"{self._connection.name}-{request_id}"

    def _fail(self, request_id: int, failure: Failure) -> None:
        name = self._name(request_id)
        if HOOKS.registered:
            self._tell_of_failure(name, failure.code, failure.text)
        detail = {**failure.detail, "request_id": name}
        self._reply(
            request_id,
            m.Error(failure.code, failure.text, detail, endpoint_raised=bool(failure.pickled)),
            failure.pickled,
        )

    def _tell_of_failure(self, name: str, code: str, text: str) -> None:
        HOOKS.emit(
            RequestFailed(
                server_id=self._core.server_id,
                request_id=name,
                session=self._connection.session_id,
                pid=self._connection.peer.pid,
                code=code,
                text=text[:_SHOWN],
            )
        )

    def _goodbye(self, frame: Frame, message: m.Goodbye) -> None:
        if self._connection.session is not None:
            self._connection.session.closing = True

    def _ping(self, frame: Frame, message: m.Ping) -> None:
        self._reply(frame.request_id, m.Pong())

    def _server_info(self, frame: Frame, message: m.GetServerInfo) -> None:
        self._reply(frame.request_id, m.Facts(self._facts()))

    def _list_endpoints(self, frame: Frame, message: m.ListEndpoints) -> None:
        self._reply(frame.request_id, m.Endpoints(self._core.registry.all()))

    def _call(self, frame: Frame, message: m.Call) -> None:
        arguments = self._arguments.take(frame, message)
        try:
            waiter = self._waiter(frame.request_id)
        except SharedRPCError:
            arguments.close()
            raise
        waiter.pooled = message.pooled and self._lane is not None  # which makes it
        waiter.on_starved = lambda why: self._ask_for_memory(frame.request_id, why)
        self._waiters[frame.request_id] = waiter
        lowered = arguments.args, arguments.kwargs
        self._core.call(waiter, message.endpoint, lowered, arguments, frozenset(message.chain))

    def _ask_for_memory(self, request_id: int, why: str) -> None:
        self._starved[request_id] = why
        self._reply(request_id, m.Starved(why))

    def _free(self, frame: Frame, message: m.Free) -> None:
        self._lane.give(message.chunks)
        if frame.request_id:
            self._reply(frame.request_id, m.Count(len(message.chunks)))

    def _await_free(self, frame: Frame, message: m.AwaitFree) -> None:
        lane, loop = self._lane, asyncio.get_running_loop()
        waiter = self._waiters[frame.request_id] = self._waiter(frame.request_id)

        def answer() -> None:
            if self._waiters.get(frame.request_id) is waiter:
                del self._waiters[frame.request_id]
                self._reply(frame.request_id, m.Free(lane.returned()))

        def told() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answer)

        waiter.on_leave = lambda: lane.forget(told)
        lane.await_chunks(told)

    def _submit(self, frame: Frame, message: m.Submit) -> None:
        arguments = self._arguments.take(frame, message)
        name, session = self._name(frame.request_id), self._connection.session_id
        info = self._core.submit(message.endpoint, (arguments.args, arguments.kwargs), arguments, name, session)
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
        if request_id in self._waiters:
            raise ProtocolError(f"request id {request_id} is in use")
        if len(self._waiters) >= _MAX_CALLS:
            raise ServerBusy(f"{_MAX_CALLS} calls of this connection are under way: wait for some of them to end")
        return Waiter(
            self._connection.session_id,
            lambda outcome: self._deliver(request_id, outcome),
            request_id=self._name(request_id),
        )

    def _tell_of_task(self, request_id: int, info: TaskInfo) -> None:
        # One who does not read misses how it went, and not how it ends.
        if not self._connection.congested:
            self._reply(request_id, m.TaskChanged(info))

    def _deliver(self, request_id: int, outcome: Delivery | Failure) -> None:
        self._answer(request_id, outcome)

    def _answer(self, request_id: int, outcome: Delivery | Failure) -> bool:
        """Answer with an outcome; False if it could not be sent, and the lease that came with it was given back."""
        waiter = self._waiters.pop(request_id, None)
        self._starved.pop(request_id, None)
        if isinstance(outcome, Failure):
            self._fail(request_id, outcome)
            return True
        record, stored = outcome.record, outcome.stored
        assert record is not None, "a call from another process needs a record"
        lane = self._core.lanes.find(self._connection.session_id)
        kept = [number for number in record.arenas if record.segments[number].info.id in self._sent]
        message = m.Result(
            object_id=stored.object_id if stored is not None else "",
            generation=stored.generation if stored is not None else 1,
            managed=outcome.managed,
            table=msgspec.Raw(record.table),
            segments=[segment.info for segment in record.segments],
            owner=self._core.server_id if stored is not None or record.arenas else "",
            kept=kept,
            arenas=list(record.arenas),
            chunks=list(record.chunks),
            own=list(record.own),
            freed=lane.freed() if lane is not None and waiter is not None and waiter.pooled else [],
        )
        fds = tuple(segment.fileno() for number, segment in enumerate(record.segments) if number not in kept)
        sent = self._reply(request_id, message, record.skeleton, fds)
        if sent:
            self._sent.update(message.segments[number].id for number in record.arenas)
        elif lane is not None:
            lane.give(record.chunks)
            lane.put_back(message.freed)
        if not sent and outcome.managed and self._connection.session is not None:
            self._core.release(self._connection.session_id, [message.object_id])
        return sent

    def _leave(self, waiter: Waiter) -> None:
        if waiter.on_leave is not None:
            waiter.on_leave()
        self._core.leave(waiter)

    def _cancel(self, frame: Frame, message: m.Cancel) -> None:
        waiter = self._waiters.pop(frame.request_id, None)
        why = self._starved.pop(frame.request_id, None)
        if waiter is not None:  # else its reply is on the way
            self._leave(waiter)
            given_up = m.Error(DeadlineExceeded.code, "the call was given up by its caller")
            self._reply(frame.request_id, given_up if why is None else m.Error(ServerBusy.code, why))

    def _get_task(self, frame: Frame, message: m.GetTask) -> None:
        self._reply(frame.request_id, m.TaskIs(self._core.tasks.table.get(message.task_id).info))

    def _list_tasks(self, frame: Frame, message: m.ListTasks) -> None:
        limit = min(max(message.limit, 1), _PAGE)
        self._reply(frame.request_id, m.TaskPage(*self._core.tasks.table.page(message.status, message.after, limit)))

    def _cancel_task(self, frame: Frame, message: m.CancelTask) -> None:
        task = self._core.tasks.table.get(message.task_id)
        self._reply(frame.request_id, m.Count(int(self._core.tasks.cancel(task))))

    def _release(self, frame: Frame, message: m.Release) -> None:
        assert self._connection.session is not None, "a request before the handshake"
        self._reply(frame.request_id, m.Count(self._core.release(self._connection.session_id, message.object_ids)))

    def _hold(self, frame: Frame, message: m.Hold) -> None:
        held = self._core.hold(self._connection.session_id, message.object_ids)
        self._reply(frame.request_id, m.Held(held))

    def _object_info(self, frame: Frame, message: m.GetObjectInfo) -> None:
        self._reply(frame.request_id, m.Facts(self._core.object_info(message.object_id)))

    def _list_objects(self, frame: Frame, message: m.ListObjects) -> None:
        items = [
            self._core.facts(stored)
            | {"kind": stored.kind, "cached": stored.listed, "holders": self._sessions.holders(stored.object_id)}
            for stored in self._core.objects
        ]
        self._reply(frame.request_id, m.FactsList(items))

    def _invalidate_call(self, frame: Frame, message: m.InvalidateCall) -> None:
        args, kwargs = decode_call(message.args, message.kwargs)
        self._reply(frame.request_id, m.Count(self._core.invalidate_call(message.endpoint, args, kwargs)))

    def _invalidate_endpoint(self, frame: Frame, message: m.InvalidateEndpoint) -> None:
        self._reply(frame.request_id, m.Count(self._core.invalidate_endpoint(message.endpoint)))

    def _create_buffer(self, frame: Frame, message: m.CreateBuffer) -> None:
        waiter = self._waiter(frame.request_id)
        waiter.deliver = lambda outcome: self._deliver_new(frame.request_id, outcome)
        self._waiters[frame.request_id] = waiter
        self._core.buffers.create(waiter, message)

    def _deliver_new(self, request_id: int, outcome: Delivery | Failure) -> None:
        if not self._answer(request_id, outcome) and isinstance(outcome, Delivery) and outcome.stored is not None:
            self._core.buffers.table.free(outcome.stored.object_id)  # nobody will ever know its id

    def _get_buffer(self, frame: Frame, message: m.GetBuffer) -> None:
        self._core.buffers.get(self._waiter(frame.request_id), message.object_id)

    def _free_buffer(self, frame: Frame, message: m.FreeBuffer) -> None:
        freed = self._core.buffers.table.free(message.object_id)
        if message.release:
            self._core.release(self._connection.session_id, [message.object_id])
        self._reply(frame.request_id, m.Count(int(freed)))

    def _list_devices(self, frame: Frame, message: m.ListDevices) -> None:
        waiter = self._waiter(frame.request_id)

        def answer(items: list[dict[str, Any]]) -> None:
            self._waiters.pop(frame.request_id, None)
            self._reply(frame.request_id, m.FactsList(items))

        self._waiters[frame.request_id] = waiter
        self._core.buffers.list_devices(waiter, answer)

    def _reload(self, frame: Frame, message: m.Reload) -> None:
        if self._core.on_reload is None:
            raise ConfigurationError(
                f"this server (pid {os.getpid()}) runs its endpoints in its own process, whose code cannot be replaced: "
                f"start it with 'shared-rpc serve' to reload it"
            )
        waiter = self._waiters[frame.request_id] = self._waiter(frame.request_id)

        def answer(outcome: dict[str, Any] | Failure) -> None:
            if self._waiters.get(frame.request_id) is not waiter:
                return
            del self._waiters[frame.request_id]
            if isinstance(outcome, Failure):
                self._fail(frame.request_id, outcome)
            else:
                self._reply(frame.request_id, m.Facts(outcome))

        self._core.on_reload(message.objects, answer)

    def _stop_server(self, frame: Frame, message: m.StopServer) -> None:
        if self._core.on_stop is None:
            raise ConfigurationError(
                f"this server is a part of process {os.getpid()}, which may do more than serve: end that process, with "
                f"'kill {os.getpid()}' or Ctrl-C"
            )
        self._reply(frame.request_id, m.Facts(self._core.on_stop(self._connection.session_id, message.if_idle)))


_HANDLERS: dict[type[m.Message], Callable[[Requests, Frame, Any], None]] = {
    m.Ping: Requests._ping,
    m.Goodbye: Requests._goodbye,
    m.GetServerInfo: Requests._server_info,
    m.ListEndpoints: Requests._list_endpoints,
    m.Call: Requests._call,
    m.Cancel: Requests._cancel,
    m.Release: Requests._release,
    m.Hold: Requests._hold,
    m.GetObjectInfo: Requests._object_info,
    m.ListObjects: Requests._list_objects,
    m.InvalidateCall: Requests._invalidate_call,
    m.InvalidateEndpoint: Requests._invalidate_endpoint,
    m.Submit: Requests._submit,
    m.GetTask: Requests._get_task,
    m.WaitTask: Requests._wait_task,
    m.FetchTask: Requests._fetch_task,
    m.ListTasks: Requests._list_tasks,
    m.CancelTask: Requests._cancel_task,
    m.Free: Requests._free,
    m.AwaitFree: Requests._await_free,
    m.CreateBuffer: Requests._create_buffer,
    m.GetBuffer: Requests._get_buffer,
    m.FreeBuffer: Requests._free_buffer,
    m.ListDevices: Requests._list_devices,
    m.Reload: Requests._reload,
    m.StopServer: Requests._stop_server,
    **GENERATION_HANDLERS,
    **MONITORING_HANDLERS,
}
