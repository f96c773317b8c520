"""A socket that carries frames, on an event loop: between a server and a client, and between a broker and a worker."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import socket
from collections.abc import Callable

from shared_rpc.errors import ConnectionClosed
from shared_rpc.memory.closing import CLOSER
from shared_rpc.protocol.frames import Frame, Limits
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.socket import FdOwner, FrameSocket

_log = logging.getLogger("shared_rpc.server")

#: Reads of one stream before other streams get their turn, and frames whose answers are sent in one write.
_TURN = 32
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


def _nothing() -> None:
    pass


def _ignore(nbytes: int) -> None:
    pass


class FramedStream:
    """Owns its socket. The loop calls it when there is something to read, or when it can write: there is no task, which would
    cost each frame a turn of the loop. On the loop only.

    :param on_frame: called with every frame, whose descriptors are closed afterwards. Its error ends the stream.
    :param on_end: called once, when the other side has hung up, after all its frames were handled, or with the error that
        ends the stream. It is to call :meth:`close`, perhaps after a last message.
    :param on_drained: called when the other side has read so much that :attr:`congested` is False again.
    :param backpressure: bytes that the other side may leave unread before nothing more is read from it.
    :param fd_backpressure: descriptors that it may leave unread.
    :param on_held: called when something is left of what has arrived, with its bytes, or nothing is left any more.
    :param limits: those of the first frames, see :meth:`limit_frames`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Exception | None], None],
        on_drained: Callable[[], None] = _nothing,
        backpressure: float = math.inf,
        fd_backpressure: float = math.inf,
        on_held: Callable[[int], None] = _ignore,
        limits: Limits | None = None,
    ) -> None:
        sock.setblocking(False)
        self._socket = FrameSocket(sock, limits)
        self.limit_frames = self._socket.limit_frames
        self._on_held = on_held
        #: Whether bytes of an incomplete frame were there at the end of the last turn.
        self._holds = False
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_drained = on_drained
        self._backpressure = backpressure
        self._fd_backpressure = fd_backpressure
        self._loop = asyncio.get_running_loop()
        #: The context of the loop's callbacks: a message may be sent in the context of an endpoint, which they must not keep.
        self._context = contextvars.copy_context()
        #: Whether there may be frames that have arrived and are not handled yet.
        self._behind = False
        #: Whether the loop continues the stream in its next turn.
        self._scheduled = False
        #: Whether everything must be written before more frames are handled.
        self._paused = False
        self._gathering = False
        self._broken = False
        #: Whether queued messages wait: the other side does not read, or has stopped reading for good.
        self.congested = False
        self.closed = False

    def start(self) -> None:
        """Begin to read.

        :raises OSError: if the kernel does not watch the socket.
        """
        self._loop.add_reader(self._socket.fileno(), self._turn)

    @property
    def full(self) -> bool:
        """Whether the other side leaves more unread than it may."""
        return self._socket.unsent > self._backpressure or self._socket.queued_fds > self._fd_backpressure

    @property
    def paused(self) -> bool:
        """Whether nothing is read from the other side, which leaves too much unread."""
        return self._paused

    @property
    def held_fds(self) -> int:
        """Descriptors of incomplete frames, and of messages that the other side has not read."""
        return self._socket.held_fds

    @property
    def newest_fd(self) -> int:
        """The last descriptor of an incomplete frame, -1 for none."""
        return self._socket.newest_fd

    def send(
        self,
        message: Message,
        request_id: int = 0,
        payload: bytes = b"",
        fds: tuple[int, ...] = (),
        owners: tuple[FdOwner, ...] = (),
        *,
        at_once: bool = False,
    ) -> None:
        """Queue a message, and write as much as goes at once. Never waits.

        :param fds: descriptors that are duplicated.
        :param owners: of descriptors, which are referred to until the message is written.
        :param at_once: whether it is written now though frames are being handled, at the end of which all goes in one write:
            for messages that must arrive before this process does anything else.
        :raises ProtocolError: if it is too large, or has too many descriptors; the stream stays good.
        :raises OSError: if this process cannot open more files.
        """
        if not self.closed:
            self._socket.queue(message, request_id, payload, fds, owners)
            if (at_once or not self._gathering) and not self.congested:
                self._flush()

    def stop_reading(self) -> None:
        """Read nothing more until the stream is closed, which is to be soon."""
        self._paused = True
        self._loop.remove_reader(self._socket.fileno())

    def close(self) -> None:
        """Hang up. ``on_end`` is not called."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            CLOSER.discard(self._socket.take_fds())
            self._socket.close()
            # The callbacks refer to this object: without them, both are freed at once.
            del self._on_frame, self._on_end, self._on_drained, self._on_held

    def abandon(self) -> None:
        """Close the descriptors and nothing else: this is a forked child, and the stream is its parent's."""
        self._socket.close()

    def drain(self) -> None:
        """Handle all that has come, as far as it can be read. For when the other process has ended. Never raises."""
        try:
            while not self.closed:
                while self._handle_frames():
                    pass
                self._socket.receive()
        except (BlockingIOError, ConnectionClosed):
            pass
        except Exception:
            _log.exception("cannot read the last frames of a process that has ended")

    def _go_on(self) -> None:
        self._scheduled = False
        self._turn()

    def _turn(self) -> None:
        """Read and handle until there is nothing more, or others must have their turn. Never raises, whatever comes.

        Reading goes on to the end, because uvloop calls once, and never again, where the other side closed with something
        unread: libuv stops polling a descriptor after an error.
        """
        if self.closed or self._paused or self._scheduled:
            return
        try:
            for _ in range(_TURN):
                if not self._behind:
                    self._socket.receive()
                self._behind = self._handle_frames()
                if self.closed or self._paused:
                    return
                if self._holds or self._socket.partial:
                    self._holds = bool(self._socket.partial) and not self._behind
                    self._on_held(len(self._socket.partial) if self._holds else 0)
                    if self._paused:
                        return
                if self._behind:
                    break
                try:
                    self._socket.sock.recv(1, _PEEK)
                except BlockingIOError:
                    return
                except OSError:
                    pass  # the next read reports the error
            self._scheduled = True
            self._loop.call_soon(self._go_on)
        except BlockingIOError:
            pass
        except ConnectionClosed:
            self._end(None)
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self.closed:
            self._on_end(error)

    def _handle_frames(self) -> bool:
        """Handle received frames, and send the answers in one write. True if there may be more."""
        sock, left = self._socket, _TURN
        if not sock.ready():
            return False
        more = self._gathering = True
        try:
            while (
                more and left and sock.queued - sock.written <= self._backpressure and sock.queued_fds <= self._fd_backpressure
            ):
                left -= 1
                frame = sock.frames.popleft()
                try:
                    self._on_frame(frame)
                finally:
                    if frame.fds:
                        CLOSER.discard(frame.fds)
                if self.closed:
                    return False
                more = bool(sock.frames) or (bool(sock.partial) and sock.ready())
        finally:
            self._gathering = False
            if sock.queued != sock.written:
                self._flush()
        if self.congested and self.full:
            if self._broken:
                raise ConnectionClosed("the other side has ended or does not read, and too many bytes for it wait")
            self._paused = True
            self._loop.remove_reader(sock.fileno())
        return more

    def _flush(self) -> None:
        if self.closed or self.congested:
            return
        try:
            if not self._socket.flush():
                self._context.run(self._loop.add_writer, self._socket.fileno(), self._writable)
                self.congested = True
        except ConnectionClosed:
            # The reading side reports the error too, after the last frames of the other side; nothing is sent until then.
            self.congested = self._broken = True
        except OSError as error:
            self._unwatched(error)

    def _writable(self) -> None:
        try:
            if not self._socket.flush():
                return
            self.congested = False
        except ConnectionClosed:
            self._broken = True
            if self._paused:
                self._end(None)
                return
        try:
            if self._paused:
                self._loop.add_reader(self._socket.fileno(), self._turn)
            self._loop.remove_writer(self._socket.fileno())
        except OSError as error:
            self._unwatched(error)
            return
        if self._paused:
            self._paused = False
            self._turn()
        if not self.congested and not self.closed:
            self._on_drained()

    def _unwatched(self, error: OSError) -> None:
        """End soon: the kernel does not watch the socket any more, so its end would go unnoticed."""
        self._loop.call_soon(self._end, error)
