"""The exchanges of one connection: frames in, events out, and no I/O.

All state of a connection is here; a driver only waits, sends queued frames and receives new ones. It works on
:class:`~shared_rpc.protocol.socket.FrameBuffers`, so that faults can be tested without a socket::

    begin ──► pending ────deliver──► answered ──reply──► returned to the caller
                  │                     ▲ │
               withdraw (Cancel)        │ └──abandon──► its grants are released
                  ▼                     │
              withdrawn ──deliver───────┘
                  │
               abandon ──► owed ──deliver──► its grants are released
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from shared_rpc.client.replies import raise_error, too_late
from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded, ProtocolError, from_wire, to_wire
from shared_rpc.memory.segments import Descriptor, KnownSegments, Segment
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import NUMBERS, decode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import sent_infos
from shared_rpc.protocol.socket import FrameBuffers, encoded
from shared_rpc.protocol.tasks import TaskInfo

#: Seconds for the server's part of the handshake, and for its answer to a request that it answers at once.
PROMPT = 5.0
#: Seconds beyond the caller's time for the server's answer to a cancellation; also the finaliser thread's maximum wait.
BRIEFLY = 1.0
#: Request ids have 32 bits and wrap around; 0 is for the handshake and the server's own messages.
LAST_ID = (1 << 32) - 1

#: The kind byte of messages that may precede the answer to a request.
_EVENT = NUMBERS[m.TaskUpdate]


class TooLate(TimeoutError):
    """The deadline of a driver's wait passed. A separate class, because a callback may raise TimeoutError too."""


class Exchange(msgspec.Struct, eq=False):
    """An active request: its unhandled updates, and its answer."""

    number: int
    request: Request
    updates: deque[TaskInfo] = msgspec.field(default_factory=deque)
    #: True once a cancellation was queued: no caller waits any more.
    withdrawn: bool = False
    #: The answer, and its message, or the reason why it cannot be read.
    frame: Frame | None = None
    answer: m.Message | str | None = None
    #: The place of the request in the byte stream of the connection.
    begin: int = 0
    end: int = 0
    #: True in a wait, in which an error leaves the connection intact.
    waits: bool = False
    #: The exchange that reads next when this one has its answer: that of the code interrupted by a signal handler.
    below: Exchange | None = None


class Exchanges:
    """All exchanges of one connection.

    :param path: the server's socket, for errors.
    :param buffers: the source of received frames, and the queue of frames to send.
    """

    def __init__(self, path: str, buffers: FrameBuffers) -> None:
        self.path = path
        self._buffers = buffers
        self._ids = itertools.count()
        #: Unanswered requests by number, including abandoned ones.
        self.pending: dict[int, Exchange] = {}
        self.owed: dict[int, Request] = {}
        #: Ids of arenas whose descriptors were sent over this connection.
        self._sent: set[str] = set()
        #: The segments of replies that later ones may name without a descriptor.
        self.known = KnownSegments[Descriptor]()
        #: The reason of the connection's end, from :func:`to_wire`: an exception would keep the frames of its traceback.
        self.broken: tuple[str, str, dict[str, str]] | None = None

    # The handshake.

    def greet(self) -> Exchange:
        """Queue the handshake."""
        return self.begin(Request(m.Hello(), "the handshake"), 0)

    def welcome(self, greeting: Exchange) -> m.Welcome:
        """Return the server's answer to the handshake.

        :raises ProtocolError: if its first message is another one.
        """
        reply = self.reply(greeting)
        reply.frame.close()
        if not isinstance(reply.message, m.Welcome):
            raise ProtocolError(f"it answered Hello with {type(reply.message).__name__}, not with Welcome")
        return reply.message

    @contextmanager
    def greeting(self) -> Iterator[None]:
        """Name the server in errors during the handshake, and turn its silence and its end into :class:`ConnectError`."""
        try:
            yield
        except TooLate as error:
            raise ConnectError(f"the server at {self.path} did not answer the handshake in time") from error
        except ConnectionClosed as error:
            raise ConnectError(f"the server at {self.path} hung up during the handshake: {error}") from error
        except ProtocolError as error:
            raise ProtocolError(f"the handshake with the server at {self.path} failed: {error}") from error

    # Requests.

    def begin(self, request: Request, number: int | None = None) -> Exchange:
        """Queue a request, with the next number if none is given.

        :raises ProtocolError: if no connection could send it; nothing was queued.
        :raises ConnectionClosed: if the connection has ended.
        """
        if self.broken is not None:
            request.tries += 1
            request.unwritten = True
            raise self.ended()
        if number is None:
            number = next(self._ids) % LAST_ID + 1
        exchange = Exchange(number, request)
        request.unwritten = True
        message, owners = request.addressed(self._sent) if request.segments else (request.message, [])
        buffers = encoded(message, number, request.payload, owners)
        exchange.begin, request.unwritten, request.sent = self._buffers.queued, False, True
        self._buffers.add(buffers, owners)
        exchange.end = self._buffers.queued
        if request.segments:
            self._sent.update([segment.info.id for segment in request.segments if segment.info.arena])
        self.pending[number] = exchange
        return exchange

    def notify(self, message: m.Message) -> None:
        """Queue a request whose answer is not needed."""
        self._buffers.queue(message, next(self._ids) % LAST_ID + 1)

    def withdraw(self, exchange: Exchange) -> bool:
        """Queue a cancellation; the server answers that, unless it has just sent the reply.

        :returns: True if that answer must be awaited: it has not arrived, and still may.
        """
        if exchange.answer is not None or self.broken is not None:
            return False
        if not exchange.withdrawn:
            exchange.withdrawn = True
            exchange.updates.clear()
            self._buffers.queue(m.Cancel(), exchange.number)
        return True

    def reply(self, exchange: Exchange) -> Reply:
        """End an exchange and return the reply, whose frame owns its descriptors.

        :raises DeadlineExceeded: if it was withdrawn before a reply arrived. A late answer is still owed.
        :raises ConnectionClosed: if the connection has ended.
        :raises Exception: the error in an error reply.
        """
        message, frame = exchange.answer, exchange.frame
        if message is None or frame is None:
            self.abandon(exchange)
            if self.broken is not None:
                raise self.ended()
            raise DeadlineExceeded(f"the server at {self.path} is stuck: {exchange.request.what} got no answer in time")
        if isinstance(message, str):
            frame.close()
            raise ProtocolError(message)
        if isinstance(message, m.Error):
            if exchange.withdrawn and message.code == DeadlineExceeded.code and not message.endpoint_raised:
                frame.close()
                raise too_late(exchange.request.what)
            raise_error(message, frame)
        return Reply(message, frame)

    def abandon(self, exchange: Exchange) -> None:
        """End an exchange without its reply, whose lease and memory are released, now or when it arrives."""
        if exchange.answer is None:
            if self.pending.pop(exchange.number, None) is not None:
                self.owed[exchange.number] = exchange.request.owed()
        elif exchange.frame is not None:
            self._discard(exchange.answer, exchange.frame, exchange.request)

    # Arriving frames.

    def deliver(self) -> list[Exchange]:
        """Deliver every complete frame to its exchange.

        :returns: the exchanges that have an update, an answer, or output to send. If the server ended the connection, its
            reason is :attr:`broken`.

        :raises ProtocolError: on a violation, after which no further data can be trusted.
        """
        buffers, news = self._buffers, []
        while buffers.frames or (buffers.partial and buffers.ready()):
            # The frame stays in the buffers, which are closed with the connection, until the exchange has it.
            frame = buffers.frames[0]
            # The first frame of a connection answers the handshake, whatever its number.
            exchange = self.pending.get(frame.request_id) or self.pending.get(0)
            if exchange is None:
                self._stray(frame)
            elif frame.kind == _EVENT:
                news.append(exchange)
                self._add_update(exchange, frame)
            else:
                news.append(exchange)
                answer = self._read(frame)
                exchange.frame, exchange.answer = frame, answer  # the answer last: its thread looks at it without the lock
                self.pending.pop(exchange.number, None)
            del buffers.frames[0]
        return news

    def _read(self, frame: Frame) -> m.Message | str:
        """Return an answer, or the reason why it cannot be read. Its descriptors become known, and known ones join it."""
        try:
            answer = decode_message(frame)
        except ProtocolError as error:
            return str(error)
        if isinstance(answer, m.Result) and len(frame.fds) == len(sent_infos(answer.segments)):
            # First those that the server took for known: a new slab may take the place of one of them.
            for number, ref in enumerate(answer.segments):
                if isinstance(ref, str) and (owner := self.known.get(ref)) is not None:
                    frame.known[number] = owner
            place = 0
            for number, ref in enumerate(answer.segments):
                if isinstance(ref, str):
                    continue
                if (ref.arena or ref.slab) and ref.id not in self.known:
                    with Segment.owning(ref, frame.fds.pop(place)) as segment:
                        frame.known[number] = segment.owner
                        self.known.add(ref, segment.owner)
                else:
                    place += 1
        return answer

    @staticmethod
    def _add_update(exchange: Exchange, frame: Frame) -> None:
        message = decode_message(frame)
        if isinstance(message, m.TaskUpdate) and not exchange.withdrawn:
            exchange.updates.append(message.info)
        frame.close()

    def _stray(self, frame: Frame) -> None:
        """Process a frame without an exchange."""
        if frame.request_id == 0:
            message = decode_message(frame)
            if isinstance(message, m.Error):
                self.fail(from_wire(message.code, message.text, message.detail))
        elif frame.kind != _EVENT:
            self._discard(self._read(frame), frame, self.owed.pop(frame.request_id, None))
        frame.close()

    def _discard(self, answer: m.Message | str, frame: Frame, request: Request | None) -> None:
        """Close an abandoned reply, and release its lease and its chunks."""
        frame.close()
        if isinstance(answer, str):
            return
        if isinstance(answer, m.Result) and request is not None and request.transfer is not None:
            request.transfer.release(answer)
        release = release_for(answer, request)
        if release is not None and self.broken is None:
            self.notify(release)

    # The end.

    def goodbye(self) -> None:
        """Queue the notice that the session ends on purpose."""
        self._buffers.queue(m.Goodbye(), 0)

    def fail(self, error: Exception) -> None:
        """Record the reason of the connection's end; the first one counts."""
        if self.broken is None:
            self.broken = to_wire(error)
        for exchange in self.pending.values():
            exchange.request.disconnected(self._buffers.written - exchange.begin, exchange.end - exchange.begin)
        self.pending.clear()
        self.owed.clear()
        self.known.clear()

    def ended(self) -> Exception:
        """Return a new error for an exchange that will get no answer."""
        return from_wire(*self.broken) if self.broken is not None else ConnectionClosed(f"the connection to {self.path} closed")


def release_for(message: m.Message, request: Request | None) -> m.Release | m.FreeBuffer | None:
    """Return the message that releases the lease of a reply, if it has one."""
    if request is not None and isinstance(request.message, m.CreateBuffer) and isinstance(message, m.Result):
        return m.FreeBuffer(message.object_id, release=True)  # no other process knows the buffer
    if isinstance(message, m.Result) and message.managed:
        return m.Release([message.object_id])
    if isinstance(message, x.Exported):
        return m.Release([message.object_id])
    if isinstance(message, x.Candidate):
        return m.Release([message.generation.object_id])
    return None
