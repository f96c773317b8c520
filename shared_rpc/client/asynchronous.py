"""The driver for coroutines, on asyncio and on trio: one connection, many concurrent calls."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from shared_rpc.client.async_link import AsyncLink
from shared_rpc.client.base import OWN_TIMEOUT, BaseClient, Turn
from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.handle import Lease
from shared_rpc.client.link import Link
from shared_rpc.client.replies import too_late
from shared_rpc.client.session import RENEWAL, Renewal, Search, renewing, takeover
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
from shared_rpc.client.suspension import renewed
from shared_rpc.client.transfer import TransferClosed
from shared_rpc.errors import ConnectError, ConnectionClosed, SharedRPCError
from shared_rpc.lifecycle.finalizer import Job

T = TypeVar("T")

#: Maximum bytes of a skeleton and a table that are decoded on the loop: well under a millisecond.
_QUICK = 2048


class CoroutineDriver(BaseClient, CoroutineMethods):
    """The driver of :class:`shared_rpc.AsyncClient`: all operations share one connection, concurrently."""

    def _begin(self) -> None:
        self._closed = False
        self._new_transfer = self._transfers()
        self._disconnected()

    def _end_job(self) -> Job | None:
        # No coroutine waits any more, since it would refer to the client: the link can end without the loop.
        link = getattr(self, "_link", None)
        return functools.partial(_leave, link) if link is not None else None

    def _after_fork(self) -> None:
        super()._after_fork()
        self._disconnected()

    def _disconnected(self) -> None:
        #: The session; None before the first one, and after :meth:`close`.
        self._link: AsyncLink | None = None
        self._connecting = anyio.Lock()

    def _links(self) -> list[AsyncLink]:
        link = self._link
        return [link] if link is not None else []

    async def close(self) -> None:
        """Close the connection and release the leases. Tensors stay valid; every later operation fails."""
        self._closed = True
        self._unwatch()
        link, self._link = self._link, None
        if link is not None:
            link.ended = True
            link.close()
            await anyio.to_thread.run_sync(link.transfer.close)  # for a GPU this waits for the device
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    # Requests of handles.

    def _has_lease(self, handle: Lease[Any]) -> bool:
        return handle.in_session(self._link)

    # Driving of operations.

    def _known(self) -> AsyncLink | None:
        return self._link

    async def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = OWN_TIMEOUT) -> T:
        """Drive an operation like :func:`shared_rpc.client.steps.drive`."""
        turn = Turn(self._connect_timeout if patience is None else patience)
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
        except BaseException:
            operation.close()
            self._undo(turn)
            raise
        finally:
            del advance
            step = None

    async def _perform(self, turn: Turn, step: Step) -> Any:
        match step:
            case Request():
                return await self._exchange(step, turn)
            case Work():
                return await _worked(step)
            case Lend():
                return self._lend(step, turn)
            case Notify():
                result = step.callback(step.info)
                return await result if inspect.isawaitable(result) else None
            case Reach():
                return await self._connected(turn)
            case Within():
                turn.deadline = step.deadline(anyio.current_time())
            case Tell():
                self._post(step.message, turn.link or self._link)
        return None

    async def _exchange(self, request: Request, turn: Turn) -> Reply:
        deadline = max(turn.deadline, anyio.current_time() + PROMPT) if request.at_once else turn.deadline
        turn.request, turn.reply = request, None
        if request.sessions and None not in request.sessions:
            turn.patience = 0.0  # the leases end with their sessions
        while True:
            link = self._link
            if link is None or not link.usable:  # else without a scope, which takes longer than all else here
                link = None
                with anyio.CancelScope(deadline=deadline):
                    link = await self._connected(turn)
                if link is None:
                    raise too_late(request.what)
            if request.transfer is not None and request.transfer is not link.transfer:
                raise TransferClosed
            turn.link = link
            if request.sessions:
                request.keep_to(link)
            try:
                turn.reply = await link.exchange(request, deadline)
                return turn.reply
            except SharedRPCError as error:
                if self._closed or not self._repeats(request, link, error) or anyio.current_time() > deadline:
                    raise

    async def _connected(self, turn: Turn) -> AsyncLink:
        link = self._link
        if link is not None and link.usable:
            return link
        renewal: Renewal | None = None
        async with self._connecting:
            if self._closed:
                raise ConnectionClosed("this client is closed")
            if self._link is None or not self._link.usable:
                link, renewal = await self._connect(turn, self._link)
            else:
                link = self._link
        outdated = renewal.outdated() if renewal is not None else []
        if outdated:
            await self._run(renewed(self, outdated), timeout=RENEWAL)
        return link

    async def _connect(self, turn: Turn, earlier: AsyncLink | None) -> tuple[AsyncLink, Renewal | None]:
        """Begin a session, which takes over the leases of the previous one."""
        search = Search(self.socket_path, turn.patience)
        while True:
            try:
                link, renewal = await self._reach(search.path, earlier)
                break
            except ConnectError as error:
                await anyio.sleep(search.failed(error))
        try:
            if earlier is not None:
                earlier.close("the server closed the connection")
                await anyio.to_thread.run_sync(earlier.transfer.close)
            if self._closed:
                raise ConnectionClosed("this client is closed")
        except BaseException:
            link.close()
            raise
        # No await from here on: a cancelled operation has either the session or its resources.
        link.transfer = self._new_transfer()
        self._link = link
        if renewal is not None:
            renewal.move(link)
            with suppress(SharedRPCError):
                for message in renewal.corrections():
                    link.post(message)
        return link, renewal

    async def _reach(self, path: str, earlier: AsyncLink | None) -> tuple[AsyncLink, Renewal | None]:
        """Open a link, and request the leases of the previous session.

        :raises ConnectError: if there is no server, or it disconnects at once.
        """
        link = await AsyncLink.open(path, self._timeout if self._timeout is not None else 3600.0)
        try:
            renewal = takeover(self._leases, earlier, link)
            if renewal is not None:
                with renewing(path):
                    renewal.granted(await link.exchange(renewal.request, anyio.current_time() + PROMPT))
        except BaseException:
            link.close()
            raise
        return link, renewal


def _leave(link: Link) -> None:
    link.ended = True
    link.close()
    link.transfer.close()


class ShieldedThreadJob:
    """A function to run in a thread, once.

    asyncio's own cancellation abandons the thread, which then uses memory that its caller believes free.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._begun = self._withdrawn = False
        self._ended = threading.Event()
        # Not the return value of run(): an idle worker thread of anyio keeps its last one.
        self._result: list[Any] = []

    def run(self) -> None:
        """Call the function, in the thread, unless it was withdrawn."""
        with self._lock:
            if self._withdrawn:
                return
            self._begun = True
        try:
            self._result.append(self._function())
        finally:
            self._ended.set()

    async def stop(self) -> bool:
        """Withdraw the function, or wait for its end regardless of cancellations; return True if there is a result."""
        with self._lock:
            self._withdrawn = True
        while self._begun and not self._ended.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    # Its own limiter: the function may need another thread.
                    await anyio.to_thread.run_sync(self._ended.wait, limiter=anyio.CapacityLimiter(1))
            except anyio.get_cancelled_exc_class():
                continue
        return bool(self._result)

    def result(self) -> Any:
        """Pop the function's result."""
        return self._result.pop()


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
