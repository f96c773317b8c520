"""The connection of an asynchronous client: one of the waiting coroutines reads for all."""

from __future__ import annotations

import inspect
import math
import socket
from contextlib import suppress
from typing import Self

import anyio
import anyio.lowlevel

from shared_rpc.client.exchange import BRIEFLY, PROMPT, Exchange
from shared_rpc.client.link import Link, new_socket
from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ConnectionClosed, ProtocolError, SharedRPCError

#: Reads for other coroutines after the reader's own answer has come.
_AT_ONCE = 64


class AsyncLink(Link):
    """A link for coroutines on asyncio and on trio, on a non-blocking socket, made with :meth:`open`."""

    _WAIT = anyio.Event

    def __init__(self, path: str, sock: socket.socket) -> None:
        super().__init__(path, sock)
        self._gathering = False
        self._writing = anyio.Lock()

    @classmethod
    async def open(cls, path: str, timeout: float) -> Self:
        """Connect and perform the handshake.

        :raises ConnectError: if no server answers at ``path``, or only another user's.
        """
        link = cls(path, new_socket(path, socket.SOCK_NONBLOCK))
        with link._handshake() as greeting, anyio.move_on_after(min(timeout, PROMPT)):
            await link._await(greeting)
        return link

    async def exchange(self, request: Request, deadline: float = math.inf) -> Reply:
        """Send a request and wait for its reply. A cancelled request is withdrawn, without waiting.

        :param deadline: the end of the wait, on the clock of anyio.current_time().
        :raises DeadlineExceeded: if there is no reply by then; a reply that just arrived is returned.
        :raises ConnectionClosed: if the server disconnects, or the link is closed.
        """
        # Requests of coroutines of the same turn of the loop are sent in one write.
        with self._lock:
            exchange = self._exchanges.begin(request)
        try:
            with anyio.CancelScope(deadline=deadline):
                await self._await(exchange)
            if exchange.answer is None:
                await self._withdraw(exchange)
        except BaseException:
            self._give_up(exchange)
            raise
        return self._finish(exchange)

    async def _withdraw(self, exchange: Exchange) -> None:
        """Withdraw a request, and wait for the server's answer to that, which gives the reason for the missing reply."""
        exchange.waits = False
        with self._lock:
            waits = self._exchanges.withdraw(exchange)
        if waits:
            with anyio.move_on_after(BRIEFLY), suppress(SharedRPCError):
                await self._await(exchange)

    async def _await(self, exchange: Exchange) -> None:
        """Send all queued output, and handle the updates of an exchange, until its answer arrives."""
        request = exchange.request
        await self._send(exchange)
        if request.transfer is not None:
            request.transfer.poll()  # while the server works
        while True:
            while exchange.updates:
                info = exchange.updates.popleft()
                exchange.waits = True
                if request.on_event is not None:
                    result = request.on_event(info)
                    if inspect.isawaitable(result):
                        await result
                # Several answers may have arrived at once, and the caller's deadline may have passed.
                await anyio.lowlevel.checkpoint()
                exchange.waits = False
            if exchange.answer is not None:
                return
            try:
                wait = self._take_turn(exchange)
                if wait is True:
                    await self._read_for_all(exchange)
                    self._leave(exchange)
                elif wait is not None:
                    exchange.waits = True
                    await wait.wait()
                    exchange.waits = False
            except BaseException:
                self._leave(exchange)
                raise
            if self._socket.unsent:  # for example the release of a late answer's lease
                await self._send(exchange)

    async def _send(self, exchange: Exchange) -> None:
        if len(self._exchanges.pending) > 1:
            # Other coroutines run too.
            if self._gathering:
                return
            self._gathering = exchange.waits = True
            try:
                await anyio.lowlevel.checkpoint()
                exchange.waits = False
            finally:
                self._gathering = False
        with self._lock:
            if self._flush():
                return
        exchange.waits = True
        async with self._writing:
            while True:
                exchange.waits = False
                with self._lock:
                    if self._flush() or not self.usable:
                        return
                exchange.waits = True
                with suppress(anyio.ClosedResourceError, OSError, ValueError):  # closed by another task
                    await anyio.wait_writable(self._socket.sock)

    async def _read_for_all(self, exchange: Exchange) -> None:
        """Deliver frames until there is news for one exchange, or output to send, or the connection has ended.

        Other answers that have arrived by then are delivered too: one recvmsg(2) returns at most one frame with descriptors,
        and handing the reading over takes a turn of the loop.
        """
        more = _AT_ONCE
        while True:
            try:
                with self._lock:
                    self._read()
                    self._deliver()
            except BlockingIOError:
                if exchange.answer is not None:
                    return
                exchange.waits = True
                try:
                    await anyio.wait_readable(self._socket.sock)
                    exchange.waits = False
                except (anyio.ClosedResourceError, OSError, ValueError) as error:
                    exchange.waits = False
                    self._break(ConnectionClosed(f"the connection was closed: {error}"))
            except (ConnectionClosed, ProtocolError) as error:
                self._break(error)
            if exchange.updates or self._exchanges.broken is not None or self._socket.unsent:
                return
            if exchange.answer is not None:
                more -= 1
                if not self._waiting or not more:
                    return

    def _close(self) -> None:
        if self._socket.fileno() >= 0:
            with suppress(Exception):  # without an event loop no coroutine waits
                anyio.notify_closing(self._socket.sock)
        super()._close()
