"""Steps of operations, and the rule that drives them.

An operation is a generator. It yields a :class:`Request` and is sent the :class:`Reply`, a :class:`Work` and is sent its
result, a :class:`Tell` or a :class:`Within` and is sent None, a :class:`Reach` and is sent the
session, a :class:`Lend` and is sent a handle; it returns the caller's result. Connecting is an operation too, of
:class:`Open`, :class:`Ask` and :class:`Pause`. Operations do no I/O, so that blocking and asynchronous clients drive the same
code. An error of the library is thrown into the operation; an endpoint's own exception is raised by the driver, see
:func:`goes_to_operation`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, TypeVar, cast

import msgspec

from shared_rpc.client.handle import Lease
from shared_rpc.client.transfer import ClientTransfer, TransferClosed
from shared_rpc.errors import ProtocolError, SharedRPCError
from shared_rpc.memory.segments import Descriptor, Segment, refer
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.tasks import TaskInfo

M = TypeVar("M", bound=m.Message)
T = TypeVar("T")

#: Maximum number of connections that may break during one request: a server that hangs up repeatedly was not restarted.
_TRIES = 3


class Request(msgspec.Struct):
    """A message to send. The descriptors are borrowed until the reply, or an error, arrives.

    ``what`` names the operation in errors. ``on_event`` is called with the updates before the reply; its error ends the
    operation.

    ``segments`` are those of a call, in the order of the message: the descriptors of arenas are sent once per connection.
    ``transfer`` receives the server's news of memory.
    """

    message: m.Message
    what: str
    payload: bytes = b""
    on_event: Callable[[TaskInfo], object] | None = None
    segments: Sequence[Segment] = ()
    transfer: ClientTransfer | None = None
    #: For a release: the session of each lease, None for an object given by its id.
    sessions: Sequence[object] = ()
    #: True if the request was queued on a connection that may have sent all of it.
    sent: bool = False
    #: The number of connections that broke during the request.
    tries: int = 0
    #: True if no byte of the request was written: it cannot be encoded, or the connection broke before.
    unwritten: bool = False

    def disconnected(self, written: int, size: int) -> None:
        """Record that the connection broke after ``written`` of ``size`` bytes. The server acts on whole frames only."""
        self.sent, self.unwritten = written >= size, written <= 0
        self.tries += 1

    def keep_to(self, session: object) -> None:
        """Remove the leases of other sessions from a release: they end with those."""
        if isinstance(self.message, m.Release):
            leases = zip(self.message.object_ids, self.sessions, strict=True)
            kept = [(object_id, each) for object_id, each in leases if each is None or each is session]
            self.message, self.sessions = m.Release([object_id for object_id, _ in kept]), [each for _, each in kept]

    @property
    def repeatable(self) -> bool:
        """True if it may be repeated over another connection, after :meth:`disconnected`, without being executed twice."""
        return self.tries < _TRIES and (self.message.again or not self.sent)

    def owed(self) -> Request:
        """Return the parts of an abandoned request that its answer needs."""
        return Request(self.message, self.what, transfer=self.transfer)

    def addressed(self, sent: set[str]) -> tuple[m.Message, Sequence[Descriptor]]:
        """Return the message of a call and its descriptors, except those of the server's own segments, and of arenas already
        ``sent`` over the connection.
        """
        refs, owners = refer(self.segments, sent.union(each.info.id for each in self.segments if each.descriptor is None))
        return msgspec.structs.replace(self.message, segments=refs), owners


class Reply(msgspec.Struct):
    """A received message, and the frame that still owns its descriptors.

    ``live``: it is from this very process, and has the result itself, ``value``, instead of a record.
    """

    message: m.Message
    frame: Frame
    live: bool = False
    value: Any = None


class Work(msgspec.Struct):
    """A function that takes time: a driver with an event loop calls it in a thread.

    ``nbytes`` is the size of the data to decode, if known: little takes less than a millisecond. ``undo`` is called with
    the result if the caller is cancelled and the operation never gets it. ``waits``: it waits for another process,
    in a thread that does not count among those of the loop.
    """

    function: Callable[[], Any]
    nbytes: int | None = None
    undo: Callable[[Any], None] | None = None
    waits: bool = False


class Tell(msgspec.Struct):
    """A message sent in the session of the operation's latest reply, without waiting for an answer."""

    message: m.Message


class Reach(msgspec.Struct):
    """A request for the server, which is not connected yet."""


class Open(msgspec.Struct):
    """A request for a new connection to the server at a path, within some seconds."""

    path: str
    seconds: float


class Ask(msgspec.Struct):
    """A request over a connection that is not the client's session yet, which the server answers at once."""

    link: Any
    request: Request


class Pause(msgspec.Struct):
    """A wait of some seconds."""

    seconds: float


class Within(msgspec.Struct):
    """The operation's remaining seconds, None for no limit, instead of the client's timeout."""

    timeout: float | None

    def deadline(self, now: float) -> float:
        """Return the end of that time, on the clock of ``now``."""
        return now + self.timeout if self.timeout is not None else math.inf


class Lend(msgspec.Struct):
    """A request for the handle of a value that arrived with a lease, on the ``object_id`` and ``generation`` of the message."""

    message: Any
    value: Any


Step = Request | Work | Tell | Reach | Open | Ask | Pause | Within | Lend
Operation = Generator[Step, Any, T]


def goes_to_operation(step: Step | None, error: BaseException) -> bool:
    """Return True if a step's error is thrown into the operation, which may have resources to release."""
    return isinstance(step, Work | Lend) or isinstance(error, SharedRPCError | TransferClosed)


def drive(operation: Operation[T], perform: Callable[[Any], Any]) -> T:
    """Drive an operation to its end; ``perform`` executes a step, and returns the value sent to the operation."""
    advance = functools.partial(operation.send, None)
    step: Step | None = None
    try:
        while True:
            # Around send() only: an endpoint may raise StopIteration too.
            try:
                step = advance()
            except StopIteration as stop:
                return cast("T", stop.value)
            try:
                # No name for the result here: code that runs below may keep this frame.
                advance = functools.partial(operation.send, perform(step))
            except BaseException as error:
                if not goes_to_operation(step, error):
                    raise
                advance = functools.partial(operation.throw, error)
    finally:
        operation.close()
        # Both may refer to an error whose frames refer to this one, and to the caller's tensors with it.
        del advance
        step = None


class Driver(ABC):
    """The base of all drivers of operations, independent of the operations."""

    #: The class of handles.
    _HANDLE: ClassVar[type[Lease[Any]]]

    @classmethod
    @abstractmethod
    def _bound(cls, name: str, body: Callable[..., Operation[Any]]) -> Callable[..., Any]:
        """Return the method that drives an operation, for a class of this driver."""

    def _handle(self, message: Any, value: Any, server_id: str, session: object) -> Lease[Any]:
        return self._HANDLE(
            value,
            object_id=message.object_id,
            server_id=server_id,
            generation=message.generation,
            issuer=self,
            session=session,
        )


class BlockingMethods(Driver):
    """A driver whose operations block until they have ended."""

    @classmethod
    def _bound(cls, name: str, body: Callable[..., Operation[Any]]) -> Callable[..., Any]:
        def method(self: BlockingMethods, /, *args: Any, **kwargs: Any) -> Any:
            return self._run(body(self, *args, **kwargs))

        # torch.compile must not trace it as a part of its caller; see shared_rpc.codec.modes.
        method.__dict__["_torchdynamo_disable"] = True
        return method

    @abstractmethod
    def _run(self, operation: Operation[T]) -> T:
        """Drive an operation."""


class CoroutineMethods(Driver):
    """A driver whose operations are coroutines."""

    @classmethod
    def _bound(cls, name: str, body: Callable[..., Operation[Any]]) -> Callable[..., Any]:
        async def method(self: CoroutineMethods, /, *args: Any, **kwargs: Any) -> Any:
            return await self._run(body(self, *args, **kwargs))

        return method

    @abstractmethod
    async def _run(self, operation: Operation[T]) -> T:
        """Drive an operation."""


def ask(request: Request, kind: type[M]) -> Operation[M]:
    """Send a request whose reply is of one kind and carries no descriptors."""
    return message_of((yield request), request.what, kind)


def query(message: m.Query[T], what: str, payload: bytes = b"", sessions: Sequence[object] = ()) -> Operation[T]:
    """Send a query; return the value of its answer."""
    answer = yield from ask(Request(message, what, payload, sessions=sessions), m.Answer)
    try:
        return message.read(answer)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the server answered {what} with another value: {error}") from error


def pages(make: Callable[[int], m.Query[tuple[list[T], int | None]]], what: str) -> Operation[list[T]]:
    """Return the items of all pages; ``make`` returns the query for the page after a number."""
    items: list[T] = []
    after: int | None = 0
    while after is not None:
        page, after = yield from query(make(after), what)
        items += page
    return items


def message_of(reply: Reply, what: str, kind: type[M]) -> M:
    """Return the message of a reply, which must be of one kind and carry no descriptors.

    :raises ProtocolError: for any other answer.
    """
    reply.frame.close()
    if not isinstance(reply.message, kind):
        raise ProtocolError(f"the server answered {what} with {type(reply.message).__name__}, not with {kind.__name__}")
    return reply.message
