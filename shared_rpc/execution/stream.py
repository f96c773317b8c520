"""A socket for frames on an event loop: between a server and a client, and between a broker and a worker."""

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

#: Reads of one stream before other streams get their turn, and frames answered in one write.
_TURN = 32
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


class FramedStream:
    """A framed socket, which it owns. The loop calls it when the socket is readable or writable: a task would cost each frame a
    turn of the loop. On the loop only.

    :param on_frame: called with every frame, whose descriptors are closed afterwards. An exception from it ends the stream.
    :param on_end: called once, when the peer has hung up and all its frames were handled, or with the error that ends the
        stream. It must call :meth:`close`, perhaps after a last message.
    :param on_drained: called when the peer has read enough that :attr:`congested` is False again.
    :param backpressure: unread bytes of the peer above which reading from it stops.
    :param fd_backpressure: unread descriptors of the peer above which reading from it stops.
    :param on_held: called with the number of received bytes that are not handled yet, and again when there are none.
    :param limits: limits of the first frames, see :meth:`limit_frames`.
    :param before_write: called before messages are written.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Exception | None], None],
        on_drained: Callable[[], object] = lambda: None,
        backpressure: float = math.inf,
        fd_backpressure: float = math.inf,
        on_held: Callable[[int], object] = lambda nbytes: None,
        limits: Limits | None = None,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self._socket = FrameSocket(sock, limits)
        self._on_held = on_held
        #: True if the last turn ended with an incomplete frame.
        self._holds = False
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_drained = on_drained
        self._before_write = before_write
        self._backpressure = backpressure
        self._fd_backpressure = fd_backpressure
        self._loop = asyncio.get_running_loop()
        #: The context of the loop's callbacks, which must not keep that of an endpoint that sends a message.
        self._context = contextvars.copy_context()
        #: True if received frames may still have to be handled.
        self._behind = False
        #: True if the loop continues the stream in its next turn.
        self._scheduled = False
        #: True if all output must be written before more frames are handled.
        self._paused = False
        self._gathering = False
        self._broken = False
        #: True while messages are queued because the peer reads slowly, or not at all any more.
        self.congested = False
        self.closed = False

    def start(self) -> None:
        """Start reading.

        :raises OSError: if the kernel cannot watch the socket.
        """
        self._loop.add_reader(self._socket.fileno(), self._turn)

    @property
    def full(self) -> bool:
        """True if the peer exceeds its limit of unread output."""
        return self._socket.unsent > self._backpressure or self._socket.queued_fds > self._fd_backpressure

    @property
    def paused(self) -> bool:
        """True while nothing is read from the peer because it leaves too much unread."""
        return self._paused

    @property
    def held_fds(self) -> int:
        """The number of descriptors of incomplete frames and of unsent messages."""
        return len(self._socket.fds) + self._socket.queued_fds

    @property
    def newest_fd(self) -> int:
        """The last descriptor of an incomplete frame, or -1."""
        return self._socket.fds[-1] if self._socket.fds else -1

    def send(
        self,
        message: Message,
        request_id: int = 0,
        payload: bytes = b"",
        owners: tuple[FdOwner, ...] = (),
        *,
        at_once: bool = False,
    ) -> None:
        """Queue a message, and write as much as possible at once. Never blocks.

        :param owners: owners of descriptors, referenced until the message is written.
        :param at_once: write now even while frames are being handled, rather than in one write at the end of the turn: for
            messages that must arrive before this process does anything else.
        :raises ProtocolError: if it is too large or has too many descriptors; the stream remains usable.
        """
        if not self.closed:
            self._socket.queue(message, request_id, payload, owners)
            if (at_once or not self._gathering) and not self.congested:
                self._flush()

    def limit_frames(self, limits: Limits) -> None:
        """Set the limits of later frames."""
        self._socket.limits = limits

    def stop_reading(self) -> None:
        """Stop reading; the stream must be closed soon."""
        self._paused = True
        self._loop.remove_reader(self._socket.fileno())

    def close(self) -> None:
        """Hang up, without calling ``on_end``."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            CLOSER.discard(self._socket.detach_fds())
            self._socket.close()
            # The callbacks refer to this object: without them, both are freed at once.
            del self._on_frame, self._on_end, self._on_drained, self._on_held, self._before_write

    def abandon(self) -> None:
        """Close only the descriptors, in a forked child: the stream is the parent's."""
        self._socket.close()

    def drain(self) -> None:
        """Handle all readable frames after the other process has ended. Never raises."""
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
        """Read and handle frames until none is left or other streams must get their turn. Never raises.

        Reading continues to the end, because uvloop calls only once if the peer closes with unread data: libuv stops polling a
        descriptor after an error.
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
        """Handle received frames, and send the answers in one write. Return True if there may be more."""
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
                raise ConnectionClosed("the peer has exited or does not read, and its output queue is full")
            self._paused = True
            self._loop.remove_reader(sock.fileno())
        return more

    def _flush(self) -> None:
        if self.closed or self.congested:
            return
        try:
            if not self._write():
                self._context.run(self._loop.add_writer, self._socket.fileno(), self._writable)
                self.congested = True
        except ConnectionClosed:
            # The reader reports the error too, after the peer's last frames; nothing is sent until then.
            self.congested = self._broken = True
        except OSError as error:
            self._unwatched(error)

    def _writable(self) -> None:
        try:
            if not self._write():
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

    def _write(self) -> bool:
        """Write as much as possible; return True if nothing is left."""
        self._before_write()
        return self._socket.flush()

    def _unwatched(self, error: OSError) -> None:
        """End the stream soon: the kernel no longer watches the socket, so its end would go unnoticed."""
        self._loop.call_soon(self._end, error)
