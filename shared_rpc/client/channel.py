"""One connection that carries many requests at once, for coroutines on asyncio and on trio."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import socket
import weakref
from collections import deque
from contextlib import suppress

import anyio
import anyio.lowlevel

from shared_rpc.client.connection import LAST_ID, PEEK, PROMPT, connect_error, refuse_stranger
from shared_rpc.client.replies import event_of, gave_up, is_last, message_of, to_give_back, too_late
from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded, ProtocolError, SharedRPCError
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import decode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.socket import FrameSocket

__all__ = ["Channel"]


class _Exchange:
    """A request under way: the frames that came for it, and what wakes its coroutine while that waits for them."""

    __slots__ = ("answered", "frames", "request", "waiting")

    def __init__(self, request: Request) -> None:
        self.request = request
        #: Whether the last answer has come.
        self.answered = False
        self.frames: deque[Frame] = deque()
        self.waiting: anyio.Event | None = None

    def wake(self) -> bool:
        """False if it does not wait: it is busy with an earlier frame, or was woken already."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.set()
        return waiting is not None


class Channel:
    """A connected, welcomed socket. Make one with :meth:`open`.

    There is no task in the background: of the coroutines that wait for replies one reads, and hands the others theirs; when
    it has its own, another one reads.
    """

    welcome: m.Welcome

    def __init__(self, path: str, sock: socket.socket) -> None:
        self.path = path
        self._socket = FrameSocket(sock)
        self._ids = itertools.count(1)
        self._exchanges: dict[int, _Exchange] = {}
        #: Requests that were given up, and that the server still owes an answer, which may bring memory.
        self._owed: dict[int, Request] = {}
        self._reading = False
        self._gathering = False
        self._sent: set[str] = set()
        self._writing = anyio.Lock()
        #: Why nothing comes any more.
        self._broken: SharedRPCError | None = None
        _open.add(self)

    @classmethod
    async def open(cls, path: str, token: str, timeout: float) -> Channel:
        """Connect and shake hands.

        :raises ConnectError: if nobody answers at ``path``, or somebody else's process does.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        channel = cls(path, sock)
        try:
            try:
                sock.connect(path)
            except OSError as error:
                raise connect_error(error, path) from error
            refuse_stranger(sock, path)
            deadline = anyio.current_time() + min(timeout, PROMPT)
            reply = await channel.exchange(Request(m.Hello(token), "the handshake"), deadline)
        except DeadlineExceeded as error:
            channel.close()
            raise ConnectError(f"the server at {path} does not answer") from error
        except ConnectionClosed as error:
            channel.close()
            raise ConnectError(f"the server at {path} hung up: {error}") from error
        except BaseException:
            channel.close()
            raise
        if not isinstance(reply.message, m.Welcome):
            channel.close()
            raise ProtocolError(f"the server at {path} greets with {type(reply.message).__name__}")
        channel.welcome = reply.message
        return channel

    @property
    def alive(self) -> bool:
        """Whether the server still holds the other end, as far as this one can tell without asking."""
        if self._broken is not None or self._socket.fileno() < 0:
            return False
        try:
            return bool(self._socket.sock.recv(1, PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def exchange(self, request: Request, deadline: float = math.inf) -> Reply:
        """Send a request and wait for its reply. One that is cancelled is taken back, and leaves the channel in order.

        :param deadline: when to give up, in terms of anyio.current_time().
        :raises DeadlineExceeded: then; a reply that came just in time is taken.
        :raises ConnectionClosed: if the server goes away, or the channel is closed.
        """
        if self._broken is not None:
            raise self._ended()
        number = (next(self._ids) - 1) % LAST_ID + 1
        request.queue(self._socket, number, self._sent)
        exchange = self._exchanges[number] = _Exchange(request)
        frame: Frame | None = None
        try:
            with anyio.CancelScope(deadline=deadline):
                await self._flush()
                request.meanwhile()
                frame = await self._answer(exchange, request)
            if frame is None:
                frame = await self._take_back(number, exchange, request)
        except BaseException as error:
            if isinstance(error, ConnectionClosed):
                request.interrupted(self._socket)
            late = frame
            if late is None and self._broken is None:
                late = await self._take_back(number, exchange, request)
            if late is not None:
                self._throw_away(late, request)
            raise
        finally:
            del self._exchanges[number]
            if not exchange.answered and self._broken is None:
                self._owed[number] = request.forgotten()
            for left in exchange.frames:
                self._throw_away(left, request)
        if frame is None or gave_up(frame):
            if frame is not None:
                frame.close()
            raise too_late(request.what)
        return Reply(message_of(frame), frame)

    async def _answer(self, exchange: _Exchange, request: Request, *, tell: bool = True) -> Frame:
        while True:
            frame = await self._next_frame(exchange)
            event = event_of(frame, request)
            if event is None:
                return frame
            if isinstance(event, m.Free):
                self._socket.queue(event, 0)
                await self._flush()
            elif tell and request.on_event is not None:
                result = request.on_event(event)
                if inspect.isawaitable(result):
                    await result
            # Several may have come at once, and the caller's time may be over.
            await anyio.lowlevel.checkpoint()

    async def _take_back(self, number: int, exchange: _Exchange, request: Request) -> Frame | None:
        """Tell the server that nobody waits; its answer is that it knows, or the reply, which came just before."""
        with anyio.move_on_after(PROMPT, shield=True), suppress(ConnectionClosed, ProtocolError):
            self._socket.queue(m.Cancel(), number)
            await self._flush()
            return await self._answer(exchange, request, tell=False)
        return None

    def tell(self, message: m.Message) -> None:
        """Send a request whose reply nobody needs, as far as that goes without waiting; the next request sends the rest."""
        with suppress(ConnectionClosed, ProtocolError, OSError):
            self._socket.queue(message, (next(self._ids) - 1) % LAST_ID + 1)
            self._socket.flush()

    async def _flush(self) -> None:
        if len(self._exchanges) > 1:
            # Others are at work too: what they send in this turn of the loop goes in the same write.
            if self._gathering:
                return
            self._gathering = True
            try:
                await anyio.lowlevel.checkpoint()
            finally:
                self._gathering = False
        if self._socket.flush():
            return
        async with self._writing:
            while not self._socket.flush():
                try:
                    await anyio.wait_writable(self._socket.sock)
                except (anyio.ClosedResourceError, OSError, ValueError) as error:
                    raise self._ended() from error

    async def _next_frame(self, exchange: _Exchange) -> Frame:
        while not exchange.frames:
            if self._broken is not None:
                raise self._ended()
            if self._reading:
                exchange.waiting = waiting = anyio.Event()
                await waiting.wait()
                continue
            self._reading = True
            try:
                while not exchange.frames and self._broken is None:
                    await self._read()
            finally:
                self._reading = False
                self._pass_on()
        return exchange.frames.popleft()

    async def _read(self) -> None:
        """Take in what arrived, and wait if nothing has."""
        try:
            try:
                self._socket.receive()
            except BlockingIOError:
                await anyio.wait_readable(self._socket.sock)
                return
            while (frame := self._socket.next_frame()) is not None:
                self._dispatch(frame)
        except (ConnectionClosed, ProtocolError) as error:
            self._break(error)
        except (anyio.ClosedResourceError, OSError, ValueError) as error:
            self._break(ConnectionClosed(f"the connection was closed: {error}"))

    def _dispatch(self, frame: Frame) -> None:
        exchange = self._exchanges.get(frame.request_id)
        if exchange is not None:
            if frame.fds and exchange.request.lane is not None:
                # The next one may be of the same arena, and be taken first.
                exchange.request.lane.learn(decode_message(frame), frame)
            exchange.frames.append(frame)
            exchange.answered = is_last(frame)
            exchange.wake()
        elif frame.request_id == 0:  # the server's last word
            try:
                message_of(frame)
            except SharedRPCError as error:
                self._break(error)
        elif is_last(frame):
            self._throw_away(frame, self._owed.pop(frame.request_id, None))
        else:
            frame.close()

    def _throw_away(self, frame: Frame, request: Request | None) -> None:
        """Nobody waits for it any more."""
        release = to_give_back(frame, request)
        if release is not None:
            self.tell(release)

    def _pass_on(self) -> None:
        """The one who read has its reply, or gives up: another one reads."""
        for exchange in self._exchanges.values():
            if exchange.wake():
                return

    def _break(self, error: SharedRPCError) -> None:
        if self._broken is None:
            self._broken = error
        for exchange in self._exchanges.values():
            exchange.wake()
        self._hang_up()

    def _ended(self) -> SharedRPCError:
        # One for each who is told: an exception that several raise has all their tracebacks.
        error = self._broken
        return type(error)(str(error)) if isinstance(error, ConnectionClosed) else error or ConnectionClosed("closed")

    def close(self, reason: str = "this client was closed") -> None:
        """Hang up. Who waits is told why."""
        self._break(ConnectionClosed(reason))

    def _hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            with suppress(Exception):  # outside of an event loop nobody is to be told
                anyio.notify_closing(self._socket.sock)
            self._socket.close()

    def abandon(self) -> None:
        """In a forked child: close the copy and nothing else."""
        self._socket.close()


_open: weakref.WeakSet[Channel] = weakref.WeakSet()


def _after_fork() -> None:
    for channel in list(_open):
        channel.abandon()


os.register_at_fork(after_in_child=_after_fork)
