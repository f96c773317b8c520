"""Operations within the process that runs the endpoints: their requests use the handlers of clients' requests.

A request is passed as a message, without a socket. The reply has the live value if there is one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import math
import os
import queue
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import anyio
import anyio.to_thread
import msgspec

from shared_rpc.client.base import BaseClient, OperationState
from shared_rpc.client.blocking import BlockingDriver
from shared_rpc.client.exchange import release_for
from shared_rpc.client.replies import too_late
from shared_rpc.client.steps import Lend, Operation, Reply, Request
from shared_rpc.client.suspension import lease_ended
from shared_rpc.context import CURRENT_RUN
from shared_rpc.errors import CapabilityError, ConfigurationError, ConnectionClosed, ServerBusy, SharedRPCError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import CallArguments
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Descriptor, Segment
from shared_rpc.operations.binding import bound
from shared_rpc.operations.client import BlockingOperations
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import sources as s
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.protocol.tasks import TaskInfo
from shared_rpc.server.core import Core
from shared_rpc.server.engine import Engine
from shared_rpc.server.requests import Lowered
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.waiting import Delivery, Waiter

T = TypeVar("T")

#: The session of this process's own requests.
_SESSION = "local"
#: Requests answered at an endpoint's end: a waiting endpoint's thread is lent until then.
OF_ENDPOINTS = {m.Call, m.WaitTask, g.Refresh, x.PrepareCandidate}
#: Requests that are not answered at once: the loop, which answers them, cannot wait for the answer.
_WAITS = {*OF_ENDPOINTS, m.CreateBuffer, m.GetBuffer, m.ListDevices, g.AwaitRefreshes, s.AwaitMisses, s.BuildMiss}
_WAITS |= {t.Resume, t.Evict, t.Restore}
#: The message of a reply with a value and no lease, and the frame of one without descriptors.
_VALUE = m.Result()
_NO_FRAME = Frame(0, 0, b"")


class _LiveRequest(Request):
    """A call with its unencoded arguments: as plain data, and for the endpoint."""

    lowered: Lowered = ((), {})
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = msgspec.field(default=((), {}))


class _Foreign(msgspec.Struct):
    """A value that no endpoint of this process has made: its receiver maps the memory, by descriptors kept here."""

    object_id: str
    skeleton: bytes
    table: bytes
    memory: list[tuple[SegmentInfo, Descriptor | None]]

    @classmethod
    def of(cls, stored: StoredObject) -> _Foreign:
        """Collect the receiver's data, on the loop: the object may be dropped before it is attached."""
        record = stored.record
        memory = [(segment.info, segment.descriptor) for segment in record.segments]
        return cls(stored.object_id, record.skeleton, record.table, memory)


def _value_of(stored: StoredObject, live: Any) -> Any:
    """Return an object for the process of the endpoints: their own value, or its memory."""
    # In the local role nothing is encoded, and None is a result too.
    return _Foreign.of(stored) if live is None and stored.record.skeleton else live


class _LocalCaller:
    """The caller of one request of this process: see :class:`shared_rpc.server.requests.Caller`."""

    local = True
    session = _SESSION
    name = ""

    def __init__(self, core: Core, request: Request) -> None:
        self.core = core
        self.request = request
        self.answered: concurrent.futures.Future[Reply] = concurrent.futures.Future()
        self.answered.set_running_or_notify_cancel()  # a waiting coroutine must not cancel it
        self._waiter: Waiter | None = None
        #: The updates before the answer, and None after the last, if there is a callback for them.
        self.events: queue.SimpleQueue[TaskInfo | None] | None = None
        if request.on_event is not None:
            events = self.events = queue.SimpleQueue()
            self.answered.add_done_callback(lambda _: events.put(None))

    def ask(self) -> None:
        """Pass the request to its handler. On the loop."""
        self.core.requests.answer(self, self.request.message)

    def stop_waiting(self) -> bool:
        """Stop waiting; return False if the answer has arrived. On the loop."""
        if self.answered.done():
            return False
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self.core.leave(waiter)
        self.answered.set_exception(concurrent.futures.CancelledError())  # a waiting thread must end
        return True

    def give_up(self) -> SharedRPCError | None:
        """Stop waiting at the deadline; return its error, None if the answer has arrived. On the loop."""
        busy = self.core.state.waits_for(self._waiter) if self._waiter is not None else ""
        if not self.stop_waiting():
            return None
        return ServerBusy(busy) if busy else too_late(self.request.what)

    def withdraw(self) -> None:
        """Stop waiting, and release the lease of the answer. On the loop."""
        if not self.stop_waiting() and self.answered.exception() is None:
            reply = self.answered.result()
            reply.frame.close()
            unwanted = release_for(reply.message, self.request)
            if unwanted is not None:
                _LocalCaller(self.core, Request(unwanted, "the release of an unwanted lease")).ask()

    @property
    def waiter(self) -> Waiter:
        """The waiter of a pending request."""
        assert self._waiter is not None, "only a waiting request has a waiter"
        return self._waiter

    @property
    def payload(self) -> bytes:
        """The payload of the request."""
        return self.request.payload

    def arguments(self, message: m.Call) -> tuple[Lowered, CallArguments]:
        assert isinstance(self.request, _LiveRequest), "a call has its arguments"
        return self.request.lowered, self.request.arguments

    def wait(self) -> Waiter:
        self._waiter = Waiter(_SESSION, self.deliver, local=True)
        return self._waiter

    def reply(self, message: m.Message, payload: bytes = b"", owners: tuple[Descriptor, ...] = ()) -> bool:
        frame = Frame(0, 0, b"", payload, [])
        try:
            for owner in owners:
                frame.fds.append(os.dup(owner.number))
        except BaseException:
            frame.close()
            raise
        if isinstance(self.request.message, t.Resume) and isinstance(message, t.Resumed):
            stored = self.core.objects.get(self.request.message.object_id)
            if stored is not None:
                return self._end(Reply(message, frame, live=True, value=_value_of(stored, stored.live)))
        return self._end(Reply(message, frame))

    def fail(self, failure: Failure) -> None:
        if not self.answered.done():
            self._waiter = None
            self.answered.set_exception(failure.to_raise())

    def deliver(self, outcome: Delivery | Failure) -> bool:
        if isinstance(outcome, Failure):
            self.fail(outcome)
            return True
        message, value, stored = _VALUE, outcome.live, outcome.stored
        if outcome.managed and stored is not None:
            message = m.Result(object_id=stored.object_id, generation=stored.generation, managed=True)
        request = self.request.message
        if stored is not None and isinstance(request, m.CreateBuffer) and request.for_record:
            infos, owners = [each.info for each in stored.record.segments], [each.owner for each in stored.record.segments]
            return self.reply(msgspec.structs.replace(message, segments=infos), stored.record.skeleton, tuple(owners))
        if stored is not None:
            value = _value_of(stored, value)
        sent = self._end(Reply(message, _NO_FRAME, live=True, value=value))
        if not sent and outcome.managed and stored is not None:
            self.core.release(_SESSION, [stored.object_id])
        return sent

    def notify(self, message: m.Message) -> None:
        assert isinstance(message, m.TaskUpdate), "other messages are no updates"
        if self.events is not None:
            self.events.put(message.info)

    def cancel(self) -> None:
        pass  # a caller in this process abandons a call by stop_waiting()

    def _end(self, reply: Reply) -> bool:
        if self.answered.done():
            reply.frame.close()
            return False
        self._waiter = None  # the waiter refers to this object: without the cycle, the value is freed at once
        self.answered.set_result(reply)
        return True


class LocalLink:
    """The session of this process's own requests, in place of a connection.

    :param values: those of this process's client, by object id.
    """

    transfer = None
    ended = False

    def __init__(self, engine: Engine, device: str, values: MutableMapping[str, Any]) -> None:
        self.server_id = engine.core.server_id
        self.device = device
        self.pid = os.getpid()
        self._engine = engine
        self._values = values

    def post(self, message: m.Message) -> None:
        """Pass on a message whose answer is not needed.

        :raises ConnectionClosed: if the engine has ended.
        """
        core = self._engine.core
        if isinstance(message, m.Release):  # of each handle: without a caller, which takes longer
            self._engine.post(functools.partial(core.release, _SESSION, message.object_ids))
        else:
            self._engine.post(_LocalCaller(core, Request(message, "a message")).ask)

    def exchange(self, request: Request, state: OperationState) -> Reply:
        """Pass on a request of an operation, which owns the reply; wait for it until the deadline."""
        caller = _LocalCaller(self._engine.core, request)
        try:
            # By one expression: no session ends in this process, and releases what an interrupted operation did not get.
            state.reply = reply = self._answer(caller, state.deadline)
        except BaseException:
            if state.reply is None:
                self._withdraw(caller)
            raise
        return reply if type(reply.value) is not _Foreign else self._attached(reply, reply.value)

    async def exchange_async(self, request: Request) -> Reply:
        """Behave like :meth:`exchange` without blocking an event loop, even if that is the engine's own."""
        caller = _LocalCaller(self._engine.core, request)
        try:
            self._engine.post(caller.ask)
            reply = await (asyncio.wrap_future(caller.answered) if self._engine.here() else _waited_for(caller.answered))
            if type(reply.value) is _Foreign:
                reply = await anyio.to_thread.run_sync(self._attached, reply, reply.value)
            return reply
        except BaseException:
            self._withdraw(caller)
            raise

    def _attached(self, reply: Reply, foreign: _Foreign) -> Reply:
        """Return a reply with the value over memory mapped here as in any other process."""
        from shared_rpc.codec.results import decode_result

        value = self._values.get(foreign.object_id)
        if value is None:
            segments = [Segment(info, descriptor) for info, descriptor in foreign.memory]
            try:
                # Kept, so that an endpoint of this process can return the memory itself.
                with MAPPINGS.attach(segments, keep=True, owner=self.server_id):
                    value = decode_result(
                        foreign.skeleton, foreign.table, segments, self.server_id, object_id=foreign.object_id
                    )
            finally:
                for segment in segments:
                    segment.close()
            with suppress(TypeError):  # lists, tuples and dicts have no weak references: each result is a new one
                value = self._values.setdefault(foreign.object_id, value)
        return Reply(reply.message, reply.frame, live=True, value=value)

    def _withdraw(self, caller: _LocalCaller) -> None:
        if not (caller.answered.done() and caller.answered.exception() is not None):
            with suppress(ConnectionClosed):
                self._engine.post(caller.withdraw)

    def _answer(self, caller: _LocalCaller, deadline: float) -> Reply:
        request = caller.request
        if self._engine.here():
            if type(request.message) in _WAITS:
                raise ConfigurationError(on_the_loop(request))
            caller.ask()
            if caller.stop_waiting():  # for an object that is restored first
                raise ConfigurationError(on_the_loop(request))
            return caller.answered.result()
        self._engine.post(caller.ask)
        if CURRENT_RUN.get() is None or type(request.message) not in OF_ENDPOINTS:
            return self._awaited(caller, deadline)
        # In an endpoint: this wait must not occupy a thread that it waits for.
        with self._engine.executor.lend_thread():
            return self._awaited(caller, deadline)

    def _awaited(self, caller: _LocalCaller, deadline: float) -> Reply:
        request = caller.request
        if request.on_event is not None and caller.events is not None:
            while (info := _next(caller.events, deadline)) is not None:
                request.on_event(info)
        if deadline < math.inf:
            concurrent.futures.wait([caller.answered], max(deadline - time.monotonic(), 0))
            if not caller.answered.done() and (error := self._engine.ask(lambda _: caller.give_up())) is not None:
                raise error
        return caller.answered.result()

    def close(self, reason: str = "") -> None:
        """Keep the leases, which end with the engine."""


@bound
class LoopbackRuntime(BlockingDriver, BlockingOperations):
    """The base of the local and the server role: requests are answered by the engine of this process, on live values.

    There is no timeout except an operation's own.
    """

    _drops_values: ClassVar[bool] = True
    _link: Any

    def __init__(self, engine: Engine, device: str) -> None:
        self._engine = engine
        super().__init__(device=device, timeout=None)

    @property
    def operations(self) -> LoopbackRuntime:
        """The runtime itself."""
        return self

    @property
    def socket_path(self) -> str:
        """The path of the server's socket.

        :raises CapabilityError: in the local role, which has none.
        """
        raise CapabilityError(
            "this process plays the local role: there is no server to be stopped, or to have tickets for its objects; serve "
            "the endpoints with SHARED_TENSOR_ROLE=server or shared-rpc serve"
        )

    def _disconnected(self) -> None:
        super()._disconnected()
        self._link = LocalLink(self._engine, self._device, self._values)

    def _sent(
        self, kind: type[m.Call], endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], what: str, *, pooled: bool = False
    ) -> Operation[tuple[Reply, None]]:
        reply: Reply = yield self._call(kind, endpoint, args, kwargs, what)
        return reply, None

    def _call(self, kind: type[m.Call], endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], what: str) -> _LiveRequest:
        from shared_rpc.codec.arguments import lower_arguments

        run = CURRENT_RUN.get()
        message = kind(endpoint, chain=sorted(run.chain) if run is not None else [])
        lowered = lower_arguments(args, kwargs, device_kind(self._device))
        return _LiveRequest(message, what, lowered=lowered, arguments=(tuple(args), kwargs))

    def _check_wait(self, request: Request) -> None:
        if self._engine.here():
            raise ConfigurationError(on_the_loop(request))

    def _exchange(self, request: Request, state: OperationState) -> Reply:
        self._begin(request, state)
        self._address(request, state, self._link)
        reply: Reply = self._link.exchange(request, state)
        return reply

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an endpoint for a coroutine, without blocking its event loop, even if that is the endpoints' loop."""
        request = self._call(m.Call, endpoint, args, kwargs, f"{endpoint}()")
        state = OperationState(request=request, link=self._link)
        try:
            state.reply = reply = await self._link.exchange_async(request)
            assert isinstance(reply.message, m.Result), "a call is answered with a Result"
            return self._lend(Lend(reply.message, reply.value), state) if reply.message.managed else reply.value
        except BaseException:
            self._undo(state)
            raise

    def _end_lease(self, object_id: str, session: object) -> Operation[None]:
        if session is self._link:  # else of the parent process
            self._post(m.Release([object_id]), session)
            yield from lease_ended(self, [object_id])

    #: Without a wait for the GPU in the finaliser thread: an endpoint may be capturing a graph.
    _end_lease_soon = BaseClient._end_lease_soon


def on_the_loop(request: Request, process: str = "server") -> str:
    """Return the error of a request that waits for an endpoint, on the event loop of the endpoints."""
    what = request.what if request.what.endswith(")") else f"{request.what}()"
    if type(request.message) is m.Call:
        return (
            f"{what} was called on the {process}'s event loop, perhaps by an async endpoint: make "
            f"{request.message.endpoint!r} an async def and await it, or call it with anyio.to_thread.run_sync"
        )
    return f"{what} was called on the {process}'s event loop: use anyio.to_thread.run_sync"


def _next(events: queue.SimpleQueue[TaskInfo | None], until: float) -> TaskInfo | None:
    """Return the next update; None at the end, and at the deadline."""
    left = until - time.monotonic()
    try:
        return events.get(timeout=left if left < math.inf else None) if left > 0 else None
    except queue.Empty:
        return None


async def _waited_for(future: concurrent.futures.Future[T]) -> T:
    if future.done():
        return future.result()
    # A separate limiter: waits must not occupy the threads that they wait for.
    return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
