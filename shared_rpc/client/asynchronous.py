"""The driver for coroutines, on asyncio and on trio: one connection, many calls at once."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from shared_rpc.client.base import OWN_TIMEOUT, BaseClient
from shared_rpc.client.channel import Channel
from shared_rpc.client.connection import Connection
from shared_rpc.client.exchange import BRIEFLY, PROMPT
from shared_rpc.client.handle import Lease
from shared_rpc.client.pool import Turn
from shared_rpc.client.replies import too_late
from shared_rpc.client.session import RENEWAL, ClientSession, Search, Takeover, renewing
from shared_rpc.client.steps import (
    CoroutineMethods,
    Lend,
    Notify,
    Operation,
    Reach,
    Reply,
    Request,
    Step,
    Tell,
    Within,
    Work,
    goes_to_operation,
)
from shared_rpc.client.suspension import lease_ended, renewed
from shared_rpc.client.thread_job import ShieldedThreadJob
from shared_rpc.client.transfer import ClientTransfer, TransferClosed
from shared_rpc.errors import ConnectError, ConnectionClosed, SharedRPCError
from shared_rpc.lifecycle.finalizer import Job
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m

T = TypeVar("T")

#: Bytes of a skeleton and a table that are decoded on the loop: well under a millisecond.
_QUICK = 2048


class CoroutineDriver(BaseClient, CoroutineMethods):
    """The driver of :class:`shared_rpc.AsyncClient`: all operations go over one connection, at once."""

    def _begin(self) -> None:
        self._closed = False
        self._new_transfer = self._transfers()
        self._disconnected()

    def _end_job(self) -> Job | None:
        # No coroutine waits any more, since it would refer to the client: the loop takes no part in the channel's end.
        channel, session = getattr(self, "_channel", None), getattr(self, "_session", None)
        return functools.partial(_leave, channel, session) if session is not None else None

    def _after_fork(self) -> None:
        super()._after_fork()
        if self._channel is not None:
            self._channel.abandon()
        self._disconnected()

    def _disconnected(self) -> None:
        self._channel: Channel | None = None
        self._session: ClientSession | None = None
        self._connecting = anyio.Lock()

    async def close(self) -> None:
        """Close the connections and release the leases. Tensors stay valid; every later operation fails."""
        self._closed = True
        self._unwatch()
        channel, session = self._channel, self._session
        self._channel, self._session = None, None
        if channel is not None:
            channel.say_goodbye()
        if session is not None:  # for a GPU this waits for the device
            await anyio.to_thread.run_sync(session.transfer.close)
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    # Requests of handles.

    async def _aend_lease(self, object_id: str, session: object) -> None:
        channel = self._channel
        if session is not self._session or channel is None:
            return
        with suppress(SharedRPCError):  # the connection has ended, and the session's leases with it
            await channel.exchange(Request(m.Release([object_id]), "release"))
            await self._run(lease_ended(self, [object_id]))
            await _drain()

    def _has_lease(self, handle: Lease[Any]) -> bool:
        return handle.in_session(self._session)

    def _return_chunks(self, transfer: ClientTransfer, chunks: list[int]) -> None:
        session, request = self._session, Request(m.Free(chunks), "free")
        if session is None or session.transfer is not transfer:
            raise TransferClosed
        try:
            self._exchange_apart(session, request).frame.close()
        except (SharedRPCError, OSError):
            if not request.sent:
                raise

    def _exchange_apart(self, session: ClientSession, request: Request) -> Reply:
        # Not on the loop: over a connection of its own, in the same session.
        connection = Connection(self.socket_path).open(session.token, BRIEFLY)
        try:
            if connection.welcome.token != session.token:
                raise ConnectionClosed("the session has ended")
            return connection.exchange(request, time.monotonic() + BRIEFLY)
        finally:
            connection.close()

    # Driving of operations.

    def _known(self) -> ClientSession | None:
        return self._session

    async def _run(self, operation: Operation[T], *, timeout: float | None = OWN_TIMEOUT) -> T:
        """Drive an operation as :func:`shared_rpc.client.steps.drive` does."""
        turn = Turn()
        turn.deadline = Within(self._timeout if timeout is OWN_TIMEOUT else timeout).deadline(anyio.current_time())
        advance = functools.partial(operation.send, None)
        step: Step | None = None
        try:
            while True:
                try:
                    step = advance()
                except StopIteration as stop:
                    return cast("T", stop.value)
                try:
                    advance = functools.partial(operation.send, await self._perform(turn, step))
                except BaseException as error:
                    if not goes_to_operation(step, error):
                        raise
                    advance = functools.partial(operation.throw, error)
        finally:
            operation.close()
            del advance
            step = None

    async def _perform(self, turn: Turn, step: Step) -> Any:
        match step:
            case Request():
                return await self._exchange(step, turn)
            case Work():
                return await _worked(step)
            case Lend():
                return self._lend(step, None if self._closed else turn.session)
            case Notify():
                result = step.callback(step.info)
                return await result if inspect.isawaitable(result) else None
            case Reach():
                return await self._server()
            case Within():
                turn.deadline = step.deadline(anyio.current_time())
            case Tell() if self._channel is not None:
                if not isinstance(step.message, m.Release) or (step.session or turn.session) is self._session:
                    self._channel.notify(step.message)
        return None

    async def _exchange(self, request: Request, turn: Turn) -> Reply:
        deadline = max(turn.deadline, anyio.current_time() + PROMPT) if request.at_once else turn.deadline
        while True:
            channel: Channel | None = None
            with anyio.CancelScope(deadline=deadline):
                channel = await self._connected()
            if channel is None:
                raise too_late(request.what)
            if request.transfer is not None and request.transfer.closed:
                raise TransferClosed
            turn.session = self._session
            if request.sessions:
                request.keep_to(turn.session)
            try:
                return await channel.exchange(request, deadline)
            except ConnectionClosed:
                # If the server hung up and the request is repeatable, the request is sent to the next server.
                if self._closed or not request.repeatable or anyio.current_time() > deadline:
                    raise

    async def _server(self) -> ClientSession:
        if self._session is None:
            await self._connected()
        if self._session is None:
            raise ConnectionClosed("this client is closed")
        return self._session

    async def _connected(self) -> Channel:
        channel = self._channel
        if channel is not None and channel.alive:
            return channel
        async with self._connecting:
            if self._closed:
                raise ConnectionClosed("this client is closed")
            if self._channel is not None and not self._channel.alive:
                self._channel.close("the server closed the connection")
                self._channel = None
            outdated: list[Lease[Any]] = []
            if self._channel is None:
                self._channel, outdated = await self._connect()
            channel = self._channel
        if outdated:
            await self._run(renewed(self, outdated), timeout=RENEWAL)
        return channel

    async def _connect(self) -> tuple[Channel, list[Lease[Any]]]:
        """Return a channel, and the handles whose memory is to be renewed."""
        search = Search(self.socket_path, self._connect_timeout)
        while True:
            try:
                channel, takeover = await self._join(search.path)
                break
            except ConnectError as error:
                await anyio.sleep(search.failed(error))
        try:
            if self._session is not None and not takeover.joined:
                await anyio.to_thread.run_sync(self._session.transfer.close)
            if self._closed:
                raise ConnectionClosed("this client is closed")
        except BaseException:
            channel.close()
            raise
        # No await from here on: whoever is cancelled has the session, or what it was to have.
        if not takeover.joined:
            self._session = takeover.begin(self._new_transfer())
            takeover.move(self._session)
        if takeover.renewal is None:
            return channel, []
        for message in takeover.renewal.corrections():
            channel.notify(message)
        return channel, takeover.renewal.outdated()

    async def _join(self, path: str) -> tuple[Channel, Takeover]:
        """Open a channel that joins the session, or begins another one, which has its leases then.

        :raises ConnectError: if there is no server, or it goes away at once.
        """
        session = self._session
        token = session.token if session is not None else ""
        channel = await Channel.open(path, token, self._timeout if self._timeout is not None else 3600.0)
        try:
            takeover = Takeover(self._leases, session, channel.welcome, channel.pid)
            if takeover.renewal is not None:
                with renewing(path):
                    takeover.renewal.granted(await channel.exchange(takeover.renewal.request, anyio.current_time() + PROMPT))
        except BaseException:
            channel.close()
            raise
        return channel, takeover


def _leave(channel: Channel | None, session: ClientSession) -> None:
    if channel is not None:
        channel.say_goodbye()
    session.transfer.close()


async def _worked(step: Work) -> Any:
    if step.nbytes is not None and step.nbytes <= _QUICK and "shared_rpc.codec.results" in sys.modules:
        return step.function()
    work = ShieldedThreadJob(step.function)
    try:
        await anyio.to_thread.run_sync(work.run)
    except anyio.get_cancelled_exc_class():
        # A cancel scope cancels it when the thread has ended, asyncio's own Task.cancel() at once.
        if await work.stop() and step.undo is not None:
            step.undo(work.result())
        raise
    return work.result()


async def _drain() -> None:
    # For a GPU this waits for the device.
    if MAPPINGS.has_unused:
        await anyio.to_thread.run_sync(MAPPINGS.drain)
