"""One connection: it reads requests, and writes the answers in whatever order they come."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel

from shared_rpc.errors import (
    CapabilityError,
    ConnectionClosed,
    ProtocolError,
    SharedRPCError,
)
from shared_rpc.server.core import Core
from shared_rpc.server.requests import Requests
from shared_rpc.server.sessions import Session, Sessions
from shared_rpc.transport import FrameSocket, Peer
from shared_rpc.wire import messages as m
from shared_rpc.wire.frames import Frame
from shared_rpc.wire.messages import decode_message

__all__ = ["Connection"]

_log = logging.getLogger("shared_rpc.server")

#: Seconds a new connection has for its first frame.
_HANDSHAKE_TIMEOUT = 10.0
#: Bytes of replies a client may leave unread before the server stops reading its requests.
_BACKPRESSURE = 1 << 20
#: Reads of one connection after which the others have their turn, and requests that are answered in one write.
_TURN = 32


async def _until(ready: Callable[[socket.socket], Awaitable[None]], sock: socket.socket) -> None:
    try:
        await ready(sock)
    except (anyio.ClosedResourceError, OSError, ValueError) as error:
        raise ConnectionClosed(f"the connection was closed: {error}") from error


class Connection:
    """Owns its socket. What the requests mean is the business of :class:`Requests`."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        core: Core,
        sessions: Sessions,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self.peer = peer
        self.session: Session | None = None
        self._socket = FrameSocket(sock)
        self._core = core
        self._sessions = sessions
        self._requests = Requests(self, core, sessions, facts)
        self._drained: asyncio.Event | None = None
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._gathering = False
        self._closed = False

    async def run(self) -> None:
        """Serve until the other side goes away or breaks the protocol. Never raises on its account."""
        try:
            with anyio.fail_after(_HANDSHAKE_TIMEOUT):
                self._welcome(await self._next_frame())
            while True:
                for _ in range(_TURN):
                    self._handle_all(await self._next_frame())
                    if self._drained is not None and self.congested:
                        await self._drained.wait()
                await anyio.lowlevel.checkpoint()
        except ConnectionClosed:
            pass
        except TimeoutError:
            _log.warning("pid %d connected and said nothing for %g s", self.peer.pid, _HANDSHAKE_TIMEOUT)
        except ProtocolError as error:
            _log.warning("pid %d broke the protocol: %s", self.peer.pid, error)
            self.reply(0, m.Error(error.code, str(error)))
        finally:
            self.close()

    def close(self) -> None:
        """End the connection now: its calls are left, what it waited for is not told any more."""
        if self._closed:
            return
        self._closed = True
        self._requests.close()
        anyio.notify_closing(self._socket.sock)
        self._socket.close()
        self._sessions.leave(self)

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

    def _handle_all(self, frame: Frame | None) -> None:
        """Handle a frame and those that came with it. What can be answered at once goes back in one write."""
        self._gathering = True
        try:
            handled = 0
            while frame is not None:
                self._requests.handle(frame)
                handled += 1
                frame = self._socket.next_frame() if handled < _TURN and not self.congested else None
        finally:
            self._gathering = False
            self._flush()

    async def _next_frame(self) -> Frame:
        while (frame := self._socket.next_frame()) is None:
            try:
                self._socket.receive()
            except BlockingIOError:
                await _until(anyio.wait_readable, self._socket.sock)
        return frame

    async def _drain(self) -> None:
        """Write what a reply could not write at once."""
        try:
            while not self._socket.flush():
                await _until(anyio.wait_writable, self._socket.sock)
        except ConnectionClosed:
            pass  # the reading side sees it too, and ends the connection
        finally:
            drained, self._drained = self._drained, None
            if drained is not None:
                drained.set()

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
            if not self._closed and self._drained is None and not self._socket.flush():
                self._drained = asyncio.Event()
                # Not a task of anyio's: a reply may come from a callback of the loop, where anyio knows no task to belong to.
                self._draining = self._loop.create_task(self._drain())

    def _welcome(self, frame: Frame) -> None:
        try:
            hello = decode_message(frame)
        finally:
            frame.close()
        if not isinstance(hello, m.Hello):
            raise ProtocolError(f"a connection begins with Hello, not with {type(hello).__name__}")
        self.session = self._sessions.join(self, hello.token)
        welcome = m.Welcome(self._core.server_id, self.session.token, os.getpid(), self._core.device)
        self.reply(frame.request_id, welcome)
