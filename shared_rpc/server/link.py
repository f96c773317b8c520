"""A socket between a broker and a worker, on either side's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from shared_rpc.errors import ConnectionClosed
from shared_rpc.protocol.catalogue import decode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.socket import FrameSocket

__all__ = ["Link"]

_log = logging.getLogger("shared_rpc.server")

#: Reads after which others have their turn.
_TURN = 32


class Link:
    """Sends and takes frames until one side closes. On the loop only.

    :param take: called with every message and its frame, which is closed afterwards. What it raises ends the link.
    :param ended: called once, when the other side is gone, after all that it had sent was taken.
    :param caught_up: called when the other side has read so much that :attr:`congested` is False again.
    """

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[Message, Frame], None],
        ended: Callable[[], None],
        caught_up: Callable[[], None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self._socket = FrameSocket(sock)
        self._take = take
        self._ended = ended
        self._caught_up = caught_up
        self._loop = asyncio.get_running_loop()
        self._behind = False
        #: Whether the other side leaves unread what it was sent: what is queued now waits here.
        self.congested = False
        self.closed = False
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def send(self, message: Message, number: int = 0, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Queue a message, and write as much as goes at once. The descriptors are duplicated.

        :raises ProtocolError: if it is too large, or has too many descriptors; the link stays good.
        :raises OSError: if this process cannot open more files.
        """
        if not self.closed:
            self._socket.queue(message, number, payload, fds)
            self._flush()

    def close(self) -> None:
        """Hang up. ``ended`` is not called."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def drain(self) -> None:
        """Take all that has come, as far as it can be read. For when the other process has ended. Never raises."""
        try:
            while not self.closed:
                self._take_frames()
                self._socket.receive()
        except (BlockingIOError, ConnectionClosed):
            pass
        except Exception:
            _log.exception("what a process had sent before its end cannot be read")

    def _readable(self) -> None:
        if not self._behind:
            self._turn()

    def _turn(self) -> None:
        self._behind = False
        if self.closed:
            return
        try:
            for _ in range(_TURN):
                self._socket.receive()
                self._take_frames()
                if self.closed:
                    return
            # As uvloop tells an end with something unread only once, it is read to the end; see Connection.
            self._behind = True
            self._loop.call_soon(self._turn)
        except BlockingIOError:
            pass
        except ConnectionClosed:
            self._end()
        except Exception:
            _log.exception("the link between broker and worker is broken")
            self._end()

    def _take_frames(self) -> None:
        while not self.closed and (frame := self._socket.next_frame()) is not None:
            try:
                self._take(decode_message(frame), frame)
            finally:
                frame.close()

    def _flush(self) -> None:
        try:
            if self.congested or self._socket.flush():
                return
            self._loop.add_writer(self._socket.fileno(), self._writable)
        except ConnectionClosed:
            pass  # the reading side sees it too, after what the other side has sent; until then nothing goes
        self.congested = True

    def _writable(self) -> None:
        try:
            if not self._socket.flush():
                return
        except ConnectionClosed:
            self._loop.remove_writer(self._socket.fileno())
            return
        self.congested = False
        self._loop.remove_writer(self._socket.fileno())
        self._caught_up()

    def _end(self) -> None:
        if not self.closed:
            self.close()
            self._ended()
