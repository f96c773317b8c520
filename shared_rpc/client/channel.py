"""One connection that carries many requests at once, for coroutines on asyncio and on trio."""

from __future__ import annotations

import inspect
import math
import socket
from contextlib import suppress
from typing import Self

import anyio
import anyio.lowlevel

from shared_rpc.client.connection import ExchangeSocket, connect
from shared_rpc.client.exchange import BRIEFLY, PROMPT, Exchange, TooLate
from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ConnectionClosed, ProtocolError, SharedRPCError
from shared_rpc.protocol import messages as m


class Channel(ExchangeSocket):
    """A connection on a non-blocking socket, made with :meth:`open`.

    There is no task in the background: of the coroutines that wait for replies one reads, and wakes the others for theirs;
    when it has its own, another one reads.
    """

    _waits = False

    def __init__(self, path: str, sock: socket.socket) -> None:
        super().__init__(path)
        self._begin(sock)
        self._reading = False
        self._gathering = False
        self._writing = anyio.Lock()
        #: The events of the coroutines that wait while another coroutine reads.
        self._waiting: dict[Exchange, anyio.Event] = {}

    @classmethod
    async def open(cls, path: str, token: str, timeout: float) -> Self:
        """Connect and shake hands.

        :raises ConnectError: if no server answers at ``path``, or another user's does.
        """
        channel = cls(path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK))
        try:
            connect(channel._socket.sock, path)
            with channel._exchanges.greeting():
                greeting = channel._exchanges.greet(token)
                with anyio.move_on_after(min(timeout, PROMPT)):
                    await channel._await(greeting)
                if greeting.answer is None:
                    raise TooLate
                channel._welcomed(greeting)
        except BaseException:
            channel.close()
            raise
        return channel

    async def exchange(self, request: Request, deadline: float = math.inf) -> Reply:
        """Send a request and wait for its reply. A request that is cancelled is withdrawn, and leaves the channel in order.

        :param deadline: when to give up, in terms of anyio.current_time().
        :raises DeadlineExceeded: if there is no reply by then; a reply that came just in time is returned.
        :raises ConnectionClosed: if the server goes away, or the channel is closed.
        """
        exchange = self._exchanges.begin(request)
        try:
            with anyio.CancelScope(deadline=deadline):
                await (self._await(exchange) if request.until is None else self._await_until(exchange, request.until))
            if exchange.answer is None:
                await self._withdraw(exchange)
        except BaseException:
            try:
                await self._withdraw(exchange)
            finally:  # asyncio's own cancellation passes a shield
                self._exchanges.abandon(exchange)
                self._send()
            raise
        return self._exchanges.reply(exchange)

    async def _await(self, exchange: Exchange) -> None:
        """Send all that is queued, and pass on the updates of an exchange, until its answer is there."""
        exchanges, request = self._exchanges, exchange.request
        await self._flush()
        if request.transfer is not None:
            request.transfer.poll()  # while the server works
        while True:
            while exchange.updates:
                info = exchange.updates.popleft()
                if request.on_event is not None:
                    result = request.on_event(info)
                    if inspect.isawaitable(result):
                        await result
                # Several answers may have come at once, and the caller's deadline may have passed.
                await anyio.lowlevel.checkpoint()
            if exchange.answer is not None:
                return
            if exchanges.broken is not None:
                raise exchanges.ended()
            await self._news(exchange)
            if self._socket.unsent:  # for example the answer to OutOfPoolMemory
                await self._flush()

    async def _await_until(self, exchange: Exchange, until: int) -> None:
        """Wait as :meth:`_await` does, but no longer than until a descriptor is readable."""
        errors: list[SharedRPCError] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_readable, tasks.cancel_scope, until)
            try:
                await self._await(exchange)
            except SharedRPCError as error:
                errors.append(error)  # the task group would wrap it
            tasks.cancel_scope.cancel()
        if errors:
            raise errors.pop()

    async def _withdraw(self, exchange: Exchange) -> None:
        with anyio.move_on_after(BRIEFLY, shield=True), suppress(SharedRPCError):
            if self._exchanges.withdraw(exchange):
                await self._await(exchange)

    def notify(self, message: m.Message) -> None:
        """Send a request whose reply is not needed, as far as possible without waiting; the next request sends the rest."""
        with suppress(ProtocolError, OSError):
            self._exchanges.notify(message)
            self._send()

    def _send(self) -> None:
        with suppress(ConnectionClosed):
            self._socket.flush()

    async def _flush(self) -> None:
        if len(self._exchanges.under_way) > 1:
            # Other coroutines run too: requests of the same turn of the loop are sent in one write.
            if self._gathering:
                return
            self._gathering = True
            try:
                await anyio.lowlevel.checkpoint()
            finally:
                self._gathering = False
        try:
            if self._socket.flush():
                return
            async with self._writing:
                while not self._socket.flush():
                    await anyio.wait_writable(self._socket.sock)
        except ConnectionClosed:
            pass  # a server that hung up may have sent the reason, which is read next
        except (anyio.ClosedResourceError, OSError, ValueError) as error:
            self._break(ConnectionClosed(f"the connection was closed: {error}"))

    async def _news(self, exchange: Exchange) -> None:
        """Wait until a frame may have come for an exchange: one of the waiting coroutines reads for all."""
        if self._reading:
            waiting = self._waiting[exchange] = anyio.Event()
            try:
                await waiting.wait()
            except BaseException:
                self._waiting.pop(exchange, None)
                if waiting.is_set():  # perhaps to read
                    self._pass_on()
                raise
            return
        self._reading = True
        try:
            await self._read()
            while not (exchange.updates or exchange.answer is not None or self._exchanges.broken or self._socket.unsent):
                await self._read()
        finally:
            self._reading = False
            self._pass_on()

    async def _read(self) -> None:
        """Receive and deliver frames, and wait if there are none."""
        try:
            try:
                self._receive()
            except BlockingIOError:
                await anyio.wait_readable(self._socket.sock)
                return
            for exchange in self._exchanges.deliver():
                self._wake(exchange)
        except (ConnectionClosed, ProtocolError) as error:
            self._break(error)
        except (anyio.ClosedResourceError, OSError, ValueError) as error:
            self._break(ConnectionClosed(f"the connection was closed: {error}"))
        if self._exchanges.broken is not None:
            self._hang_up()

    def _wake(self, exchange: Exchange) -> None:
        waiting = self._waiting.pop(exchange, None)
        if waiting is not None:
            waiting.set()

    def _pass_on(self) -> None:
        """Wake another coroutine, to read, if none reads."""
        if not self._reading and self._waiting:
            self._wake(next(iter(self._waiting)))

    def _break(self, error: SharedRPCError) -> None:
        self._exchanges.fail(error)
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the socket, and wake all waiting coroutines: nothing comes any more."""
        for exchange in list(self._waiting):
            self._wake(exchange)
        if self._socket.fileno() >= 0:
            with suppress(Exception):  # without an event loop no coroutine waits
                anyio.notify_closing(self._socket.sock)
            self._socket.close()

    def say_goodbye(self) -> None:
        """Notify the server that the session ends on purpose, as far as possible at once, and hang up."""
        with suppress(ProtocolError, OSError):
            self._exchanges.goodbye()
            self._send()
        self.close()

    def close(self, reason: str = "this client was closed") -> None:
        """Hang up. All waiting coroutines get the reason."""
        self._break(ConnectionClosed(reason))


async def _cancel_when_readable(scope: anyio.CancelScope, fd: int) -> None:
    await anyio.wait_readable(fd)
    scope.cancel()
