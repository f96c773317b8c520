"""The driver for coroutines, on asyncio and on trio: one connection, many concurrent calls."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from shared_rpc.client.async_link import AsyncLink
from shared_rpc.client.base import OWN_TIMEOUT, BaseClient, OperationState
from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.session import RENEWAL
from shared_rpc.client.steps import (
    Ask,
    CoroutineMethods,
    Lend,
    Open,
    Operation,
    Pause,
    Reach,
    Reply,
    Request,
    Step,
    Tell,
    Within,
    Work,
    goes_to_operation,
)
from shared_rpc.client.suspension import renew_handles
from shared_rpc.errors import SharedRPCError

T = TypeVar("T")

#: Maximum bytes of a skeleton and a table that are decoded on the loop: well under a millisecond.
_QUICK = 2048


class CoroutineDriver(BaseClient, CoroutineMethods):
    """The driver of :class:`shared_rpc.AsyncClient`: all operations share one connection, concurrently."""

    _link: AsyncLink | None

    def _disconnected(self) -> None:
        super()._disconnected()
        self._connecting = anyio.Lock()

    async def close(self) -> None:
        """Close the connection and release the leases. Tensors stay valid; every later operation fails."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            link.ended = True
            link.close()
            await anyio.to_thread.run_sync(link.transfer.close)  # for a GPU this waits for the device
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    # Driving of operations.

    async def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = OWN_TIMEOUT) -> T:
        """Drive an operation like :func:`shared_rpc.client.steps.drive`."""
        state = OperationState(self._connect_timeout if patience is None else patience)
        state.deadline = Within(self._timeout if timeout is OWN_TIMEOUT else timeout).deadline(anyio.current_time())
        advance = functools.partial(operation.send, None)
        step: Step | None = None
        try:
            while True:
                try:
                    step = advance()
                except StopIteration as stop:
                    return cast("T", stop.value)
                try:
                    advance = functools.partial(operation.send, await self._perform(state, step))
                except BaseException as error:
                    if not goes_to_operation(step, error):
                        raise
                    advance = functools.partial(operation.throw, error)
        except BaseException:
            operation.close()
            self._undo(state)
            raise
        finally:
            del advance
            step = None

    async def _perform(self, state: OperationState, step: Step) -> Any:
        match step:
            case Request():
                return await self._exchange(step, state)
            case Work():
                return await _worked(step)
            case Lend():
                return self._lend(step, state)
            case Reach():
                return await self._connected(state)
            case Open():
                return await AsyncLink.open(step.path, step.seconds)
            case Ask():
                return await step.link.exchange(step.request, anyio.current_time() + PROMPT)
            case Pause():
                await anyio.sleep(step.seconds)
                self._check_open()
            case Within():
                state.deadline = step.deadline(anyio.current_time())
            case Tell():
                self._post(step.message, state.link or self._link)
        return None

    async def _exchange(self, request: Request, state: OperationState) -> Reply:
        self._begin(request, state)
        while True:
            # A ready link needs no cancel scope, which takes longer than all else here.
            link = self._ready_link() or await self._connected(state)
            self._address(request, state, link)
            try:
                state.reply = await link.exchange(request, state.deadline)
                return state.reply
            except SharedRPCError as error:
                if not self._repeats(request, link, error) or anyio.current_time() > state.deadline:
                    raise

    async def _connected(self, state: OperationState) -> AsyncLink:
        """Return the link; if there is none, one operation at a time connects."""
        with anyio.CancelScope(deadline=state.deadline) as scope:
            async with self._connecting:
                session = self._new_session(state.patience, state.deadline - anyio.current_time())
                outdated = await self._run(session, timeout=None)
            if outdated:
                await self._run(renew_handles(self, outdated), timeout=RENEWAL)
        return cast("AsyncLink", self._connected_link(scope.cancelled_caught))


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
        await anyio.to_thread.run_sync(work.run, limiter=anyio.CapacityLimiter(1) if step.waits else None)
    except anyio.get_cancelled_exc_class():
        # A cancel scope cancels it when the thread has ended, asyncio's own Task.cancel() at once.
        if await work.stop() and step.undo is not None:
            step.undo(work.result())
        raise
    return work.result()
