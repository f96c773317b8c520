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
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar, cast

import anyio
import anyio.to_thread
import msgspec

from shared_rpc.client.exchange import release_for
from shared_rpc.client.handle import Lease
from shared_rpc.client.replies import too_late
from shared_rpc.client.session import LeaseBook
from shared_rpc.client.steps import BlockingMethods, Lend, Notify, Operation, Reply, Request, Step, Tell, Within, Work, drive
from shared_rpc.client.subscriptions import NewsSource, Subscriptions
from shared_rpc.client.suspension import Context, Suspensions, lease_ended
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
from shared_rpc.protocol.generations import Generation
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
_OF_ENDPOINTS = {m.Call, m.WaitTask, g.Refresh, x.PrepareCandidate}
#: Requests that are not answered at once: the loop, which answers them, cannot wait for the answer.
_WAITS = {*_OF_ENDPOINTS, m.CreateBuffer, m.GetBuffer, m.ListDevices, g.AwaitRefreshes, s.AwaitMisses, s.BuildMiss}
_WAITS |= {t.Resume, t.Evict, t.Restore}
_NO_TABLE = msgspec.Raw(b"")
#: The message of a reply with a value and no lease, and the frame of one without descriptors.
_VALUE = m.Result(_NO_TABLE, [])
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


class _LocalLease:
    """The lease of one handle, which is released once, however often that is requested. On the loop."""

    __slots__ = ("core", "object_id", "over")

    def __init__(self, core: Core, object_id: str) -> None:
        self.core = core
        self.object_id = object_id
        self.over = False

    def end(self) -> bool:
        """Mark it as released; return False if it was before."""
        was, self.over = self.over, True
        return not was

    def give_back(self) -> None:
        """Release the lease."""
        if self.end():
            self.core.release(_SESSION, [self.object_id])


class _Turn:
    """One operation: its deadline, the latest request, unless a handle has the lease of its reply, and the handles so far."""

    __slots__ = ("caller", "lent", "until")

    def __init__(self) -> None:
        self.caller: _LocalCaller | None = None
        self.lent: list[tuple[Lease[Any], _LocalCaller | None]] = []
        self.until = math.inf


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
        #: The lease of the answer.
        self.lease: _LocalLease | None = None
        #: The updates before the answer, and None after the last, if there is a callback for them.
        self.events: queue.SimpleQueue[TaskInfo | None] | None = None
        if request.on_event is not None:
            events = self.events = queue.SimpleQueue()
            self.answered.add_done_callback(lambda _: events.put(None))

    def ask(self) -> None:
        """Pass the request to its handler. On the loop."""
        message = self.request.message
        if isinstance(message, m.Release) and self.request.sessions:
            leases = zip(message.object_ids, self.request.sessions, strict=True)
            message = m.Release([name for name, lease in leases if not isinstance(lease, _LocalLease) or lease.end()])
        self.core.requests.answer(self, message)

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
            if unwanted is not None and (self.lease is None or self.lease.end()):
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
            message = m.Result(_NO_TABLE, [], object_id=stored.object_id, generation=stored.generation, managed=True)
            self.lease = _LocalLease(self.core, stored.object_id)
        if stored is not None and self.request.bare:
            infos, owners = [each.info for each in stored.record.segments], [each.owner for each in stored.record.segments]
            return self.reply(msgspec.structs.replace(message, segments=infos), stored.record.skeleton, tuple(owners))
        if stored is not None:
            value = _value_of(stored, value)
        sent = self._end(Reply(message, _NO_FRAME, live=True, value=value))
        if not sent and self.lease is not None:
            self.lease.give_back()
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


class LoopbackDriver(BlockingMethods, Context):
    """The driver of the local and the server role: requests are answered by the engine of this process.

    There is no timeout except an operation's own.
    """

    _drops_values: ClassVar[bool] = True
    transfer = None

    def __init__(self, engine: Engine, device: str) -> None:
        self.server_id = engine.core.server_id
        self.device = device
        self.pid = os.getpid()
        self._engine = engine
        #: Tensors of buffers in this process, by object id: a tensor is rebuilt once, as in a client.
        self._values: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._watch = Subscriptions(functools.partial(_LoopbackSource, engine))
        self._leases = LeaseBook()
        self._suspensions = Suspensions(self._leases)

    # Facts for operations.

    def _known(self) -> LoopbackDriver:
        return self

    def _sent(
        self, kind: type[m.Call], endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], what: str, *, pooled: bool = False
    ) -> Operation[tuple[Reply, None]]:
        run = CURRENT_RUN.get()
        message = kind(endpoint, chain=sorted(run.chain) if run is not None else [])
        live = tuple(args), kwargs
        reply: Reply = yield _LiveRequest(message, what, lowered=self._lowered(args, kwargs), arguments=live)
        return reply, None

    def _lowered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        from shared_rpc.codec.arguments import lower_arguments

        return lower_arguments(args, kwargs, device_kind(self.device))

    def _unwatch(self) -> None:
        self._watch.close()

    # Driving of operations.

    def _run(self, operation: Operation[T]) -> T:
        turn = _Turn()
        try:
            return drive(operation, functools.partial(self._perform, turn))
        except BaseException:
            self._withdraw(turn.caller)
            for handle, caller in turn.lent:
                if handle._drop() and caller is not None:
                    self._withdraw(caller)
            raise
        finally:
            del turn  # the turn refers to the value

    def _perform(self, turn: _Turn, step: Step) -> Any:
        match step:
            case Request():
                turn.caller = _LocalCaller(self._engine.core, step)
                reply = self._answer(turn.caller, turn.until)
                if type(reply.value) is _Foreign:
                    reply = Reply(reply.message, reply.frame, live=True, value=self._attached(reply.value))
                return reply
            case Work():
                return step.function()
            case Lend():
                caller, turn.caller = turn.caller, None
                handle = self._lend(step.message, step.value, caller)
                turn.lent.append((handle, caller))
                return handle
            case Notify():
                return step.callback(step.info)
            case Within():
                turn.until = step.deadline(time.monotonic())
            case Tell():
                with suppress(ConnectionClosed):
                    self._engine.post(_LocalCaller(self._engine.core, Request(step.message, "a message")).ask)
        return None

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an endpoint for a coroutine, without blocking its event loop, even if that is the endpoints' loop."""
        request = next(self._sent(m.Call, endpoint, args, kwargs, f"{endpoint}()"))
        caller = _LocalCaller(self._engine.core, cast(Request, request))
        try:
            self._engine.post(caller.ask)
            waiting = asyncio.wrap_future(caller.answered) if self._engine.here() else _waited_for(caller.answered)
            reply = await waiting
            assert isinstance(reply.message, m.Result), "a call is answered with a Result"
            value = reply.value
            if type(value) is _Foreign:
                value = await anyio.to_thread.run_sync(self._attached, value)
            return self._lend(reply.message, value, caller) if reply.message.managed else value
        except BaseException:
            self._withdraw(caller)
            raise
        finally:
            del caller

    def _withdraw(self, caller: _LocalCaller | None) -> None:
        if caller is not None and not (caller.answered.done() and caller.answered.exception() is not None):
            with suppress(ConnectionClosed):
                self._engine.post(caller.withdraw)

    def _answer(self, caller: _LocalCaller, until: float) -> Reply:
        request = caller.request
        if self._engine.here():
            if type(request.message) in _WAITS:
                raise ConfigurationError(_on_the_loop(request))
            caller.ask()
            if caller.stop_waiting():  # for an object that is restored first
                raise ConfigurationError(_on_the_loop(request))
            return caller.answered.result()
        self._engine.post(caller.ask)
        if CURRENT_RUN.get() is None or type(request.message) not in _OF_ENDPOINTS:
            return self._awaited(caller, until)
        # In an endpoint: this wait must not occupy a thread that it waits for.
        with self._engine.lend_thread():
            return self._awaited(caller, until)

    def _awaited(self, caller: _LocalCaller, until: float) -> Reply:
        request = caller.request
        if request.on_event is not None and caller.events is not None:
            while (info := _next(caller.events, until)) is not None:
                request.on_event(info)
        if until < math.inf and not request.at_once:
            concurrent.futures.wait([caller.answered], max(until - time.monotonic(), 0))
            if not caller.answered.done() and (error := self._engine.ask(lambda _: caller.give_up())) is not None:
                raise error
        return caller.answered.result()

    def _lend(self, message: m.Result, value: Any, caller: _LocalCaller | None) -> Lease[Any]:
        lease = (caller and caller.lease) or _LocalLease(self._engine.core, message.object_id)
        if caller is not None:
            caller.lease = lease
        handle = self._handle(message, value, self.server_id, lease)
        self._leases.add(handle)
        return handle

    def _attached(self, foreign: _Foreign) -> Any:
        """Return a value over memory mapped here as in any other process."""
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
        return value

    # Requests of handles.

    def _end_lease(self, object_id: str, session: object) -> Operation[None]:
        assert isinstance(session, _LocalLease), "the lease of a handle of this process"
        with suppress(ConnectionClosed):  # without the engine there is no lease
            self._engine.post(session.give_back)
            yield from lease_ended(self, [session.object_id])

    def _end_lease_soon(self, object_id: str, session: object) -> None:
        self._run(self._end_lease(object_id, session))

    def _has_lease(self, handle: Lease[Any]) -> bool:
        lease = handle._session
        return isinstance(lease, _LocalLease) and lease.core is self._engine.core and not lease.over


@bound
class LoopbackRuntime(LoopbackDriver, BlockingOperations):
    """A role whose operations run in this process, on live values."""

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


class _LoopbackSource(NewsSource):
    """News of the core of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._caller: _LocalCaller | None = None
        self._over = False

    def news(self, after: int) -> tuple[list[Generation], int]:
        caller = self._caller = _LocalCaller(self._engine.core, Request(g.AwaitRefreshes(after), "the wait for refreshes"))
        self._engine.post(caller.ask)
        if self._over:
            self.close()
        try:
            message = caller.answered.result().message
        except concurrent.futures.CancelledError as error:
            raise ConnectionClosed("all subscriptions have ended") from error
        assert isinstance(message, g.Refreshes), "the answer to AwaitRefreshes is Refreshes"
        return message.generations, message.after

    def close(self) -> None:
        self._over = True
        if self._caller is not None:
            with suppress(ConnectionClosed):
                self._engine.post(self._caller.stop_waiting)


def _on_the_loop(request: Request) -> str:
    what = request.what if request.what.endswith(")") else f"{request.what}()"
    if type(request.message) is m.Call:
        return (
            f"{what} was called on the server's event loop, perhaps by an async endpoint: make {request.message.endpoint!r} an "
            f"async def and await it, or call it with anyio.to_thread.run_sync"
        )
    return f"{what} was called on the server's event loop: use anyio.to_thread.run_sync"


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
