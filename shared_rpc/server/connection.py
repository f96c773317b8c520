"""One connection: it reads requests, and writes the answers in whatever order they come."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shared_rpc.errors import CapabilityError, ConnectionClosed, ProtocolError, SharedRPCError
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import decode_message
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.peers import Peer
from shared_rpc.protocol.socket import FrameSocket
from shared_rpc.server.core import Core
from shared_rpc.server.requests import Requests
from shared_rpc.server.sessions import Session, Sessions

__all__ = ["Connection"]

_log = logging.getLogger("shared_rpc.server")

#: Seconds a new connection has for its first frame.
_HANDSHAKE_TIMEOUT = 10.0
#: Bytes of replies a client may leave unread before the server stops reading its requests.
_BACKPRESSURE = 1 << 20
#: Reads of one connection after which the others have their turn, and requests that are answered in one write.
_TURN = 32
#: Connections of this process, in the order they came.
_numbers = itertools.count(1)


class Connection:
    """Owns its socket. The loop calls it when there is something to read, or room to write: there is no task, which would
    cost each request a turn of the loop. What the requests mean is the business of :class:`Requests`.

    :param on_close: called once, when it ends.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        core: Core,
        sessions: Sessions,
        facts: Callable[[], dict[str, Any]],
        on_close: Callable[[Connection], None],
    ) -> None:
        self.peer = peer
        self.session: Session | None = None
        #: Tells it from all others, of all servers: what its requests are called begins with it.
        self.name = ""
        self._socket = FrameSocket(sock)
        self._core = core
        self._sessions = sessions
        self._requests = Requests(self, core, sessions, facts)
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        #: A reply may come in the context of an endpoint, and what the loop is to call must not keep that.
        self._context = contextvars.copy_context()
        self._silence: asyncio.TimerHandle | None = None
        #: Whether it goes on in the loop's next turn.
        self._behind = False
        #: Whether all must be written before more is handled.
        self._paused = False
        self._gathering = False
        self._writing = False
        self._closed = False

    def start(self) -> None:
        """Serve until the other side goes away or breaks the protocol."""
        self._silence = self._loop.call_later(_HANDSHAKE_TIMEOUT, self._said_nothing)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        """End the connection now: its calls are left, what it waited for is not told any more."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        if self._silence is not None:
            self._silence.cancel()
        self._requests.close()
        del self._requests  # it knows this object, and both are to go at once
        self._socket.close()
        self._sessions.leave(self)
        self._on_close(self)

    @property
    def session_id(self) -> str:
        """The id of its session, which it has from the handshake on."""
        assert self.session is not None, "a request before the handshake"
        return self.session.session_id

    @property
    def congested(self) -> bool:
        """Whether the client leaves too much of its replies unread."""
        return self._socket.unsent > _BACKPRESSURE

    def refuse(self, error: SharedRPCError) -> None:
        """Tell the other side why it is turned away, and end."""
        self.reply(0, m.Error(error.code, str(error)))
        self.close()

    def abandon(self) -> None:
        """Close the descriptors and nothing else: this is a forked child, and the connection is its parent's."""
        self._socket.close()

    def _readable(self) -> None:
        if not self._behind:
            self._turn()

    def _go_on(self) -> None:
        if not self._closed:
            self._turn()

    def _turn(self) -> None:
        """Read and handle until there is nothing more, or others must have their turn. Never raises, whatever comes.

        Reading goes on to the end, because uvloop calls once, and never again, where the other side closed with something
        unread: libuv stops polling a descriptor after an error.
        """
        try:
            for _ in range(_TURN):
                self._behind = self._handle_frames()
                if self._behind or self._paused:
                    break
                self._socket.receive()
            if not self._paused:
                self._behind = True
                self._loop.call_soon(self._go_on)
        except BlockingIOError:
            pass
        except ConnectionClosed:
            self.close()
        except ProtocolError as error:
            _log.warning("pid %d broke the protocol: %s", self.peer.pid, error)
            self.refuse(error)
        except Exception:
            _log.exception("the connection of pid %d is ended", self.peer.pid)
            self.close()

    def _handle_frames(self) -> bool:
        """Handle what has come, and answer in one write what can be answered at once. True if there may be more."""
        self._gathering = True
        frame, left = None, _TURN
        try:
            while left and not self._closed and not self.congested and (frame := self._socket.next_frame()) is not None:
                left -= 1
                if self.session is None:
                    self._welcome(frame)
                else:
                    self._requests.handle(frame)
        finally:
            self._gathering = False
            self._flush()
        if self.congested and self._writing:
            self._paused = True
            self._loop.remove_reader(self._socket.fileno())
        return frame is not None

    def reply(self, request_id: int, message: m.Message, payload: bytes = b"", fds: tuple[int, ...] = ()) -> bool:
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
            if not self._closed and not self._writing and not self._socket.flush():
                try:
                    self._context.run(self._loop.add_writer, self._socket.fileno(), self._writable)
                    self._writing = True
                except OSError as error:
                    self._unwatched(error)

    def _writable(self) -> None:
        try:
            if not self._socket.flush():
                return
        except ConnectionClosed:
            self.close()
            return
        try:
            if self._paused:
                self._loop.add_reader(self._socket.fileno(), self._readable)
            self._loop.remove_writer(self._socket.fileno())
        except OSError as error:
            self._unwatched(error)
            return
        self._writing = False
        if self._paused:
            self._paused = False
            self._go_on()

    def _unwatched(self, error: OSError) -> None:
        """The kernel does not watch the socket any more, so nobody would notice its end."""
        _log.error("cannot serve pid %d: %s", self.peer.pid, error)
        self._loop.call_soon(self.close)

    def _said_nothing(self) -> None:
        if self.session is None:
            _log.warning("pid %d connected and said nothing for %g s", self.peer.pid, _HANDSHAKE_TIMEOUT)
            self.close()

    def _welcome(self, frame: Frame) -> None:
        try:
            hello = decode_message(frame)
        finally:
            frame.close()
        if not isinstance(hello, m.Hello):
            raise ProtocolError(f"a connection begins with Hello, not with {type(hello).__name__}")
        self.session = self._sessions.join(self, hello.token)
        self.name = f"{self.session.session_id[:8]}-{next(_numbers)}"
        welcome = m.Welcome(self._core.server_id, self.session.token, os.getpid(), self._core.device)
        self.reply(frame.request_id, welcome)
