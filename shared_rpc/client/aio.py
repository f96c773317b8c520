"""The client for coroutines, on asyncio and on trio: one connection, many calls at once."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from shared_rpc.client import buffers, operations, tickets
from shared_rpc.client.base import OWN_TIMEOUT
from shared_rpc.client.channel import Channel
from shared_rpc.client.connection import PROMPT, Connection
from shared_rpc.client.lane import Lane, LaneClosed
from shared_rpc.client.monitoring import AsyncMonitoring
from shared_rpc.client.process_exit import ProcessExit
from shared_rpc.client.refreshing import AsyncRefreshing
from shared_rpc.client.replies import too_late
from shared_rpc.client.session import Search, Session, Takeover, held_of
from shared_rpc.client.steps import Notify, Operation, Reply, Request, Tell, Work
from shared_rpc.client.thread_job import ShieldedThreadJob
from shared_rpc.errors import ConnectError, ConnectionClosed, SharedRPCError
from shared_rpc.handle import AsyncHandle, forgone, unreachable
from shared_rpc.lifecycle.finalizer import Job
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.tasks import TaskInfo
from shared_rpc.protocol.ticket import Ticket, read_ticket

if TYPE_CHECKING:
    import torch

__all__ = ["AsyncClient"]

T = TypeVar("T")

#: Bytes of a skeleton and a table that are decoded on the loop: that takes well under a millisecond.
_QUICK = 2048


class AsyncClient(AsyncRefreshing, AsyncMonitoring):
    """:class:`Client` for coroutines: the same operations, by the same names, to be awaited.

    All of them go over one connection, at once, and none waits for another. Rebuilding a large value, and copying memory in
    arguments, is done in threads, so that the event loop goes on. Cancelling the scope that awaits an operation takes the
    request back, and leaves the connection to the others. A client belongs to the event loop it is first used on.

    For the parameters see :class:`Client`.
    """

    def _begin(self) -> None:
        self._closed = False
        self._new_lane = self._lanes()
        self._disconnected()

    def _leaves(self) -> Job | None:
        # No coroutine waits any more: it would have the client. So the loop has nothing to do with the channel's end.
        channel, session = getattr(self, "_channel", None), getattr(self, "_session", None)
        return functools.partial(_leave, channel, session) if session is not None else None

    def _after_fork(self) -> None:
        super()._after_fork()
        if self._channel is not None:
            self._channel.abandon()
        self._disconnected()

    def _disconnected(self) -> None:
        self._channel: Channel | None = None
        self._session: Session | None = None
        self._connecting = anyio.Lock()

    async def ping(self) -> float:
        """One round trip; the seconds it took."""
        begin = time.perf_counter()
        await self._run(operations.ping())
        return time.perf_counter() - begin

    async def get_server_info(self) -> dict[str, Any]:
        """See :meth:`Client.get_server_info`."""
        return await self._run(operations.server_info())

    async def list_endpoints(self) -> dict[str, dict[str, Any]]:
        """See :meth:`Client.list_endpoints`."""
        return await self._run(operations.list_endpoints())

    async def list_objects(self) -> list[dict[str, Any]]:
        """See :meth:`Client.list_objects`."""
        return await self._run(operations.list_objects())

    async def call(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint: an :class:`AsyncHandle` where it is managed, else its result. See :meth:`Client.call`."""
        server = await self._server()
        operation = operations.call(endpoint, args, kwargs, server.device, self._values, server.server_id, self._lane)
        return self._hand(await self._run(operation))

    async def submit(self, endpoint: str, /, *args: Any, **kwargs: Any) -> str:
        """See :meth:`Client.submit`."""
        server = await self._server()
        return await self._run(operations.submit(endpoint, args, kwargs, server.device, server.server_id))

    async def execute(
        self,
        endpoint: str,
        /,
        *args: Any,
        wait: bool = True,
        timeout: float | None = None,
        callback: Callable[[TaskInfo], object] | None = None,
        **kwargs: Any,
    ) -> Any:
        """See :meth:`Client.execute`."""
        task_id = await self.submit(endpoint, *args, **kwargs)
        return await self.wait_for_task(task_id, timeout, callback) if wait else task_id

    async def get_task_status(self, task_id: str) -> TaskInfo:
        """See :meth:`Client.get_task_status`."""
        return await self._run(operations.task_status(task_id))

    async def get_task_result(self, task_id: str) -> Any:
        """See :meth:`Client.get_task_result`."""
        return self._hand(await self._run(operations.task_result(task_id, self._values)))

    async def wait_for_task(
        self, task_id: str, timeout: float | None = None, callback: Callable[[TaskInfo], object] | None = None
    ) -> Any:
        """See :meth:`Client.wait_for_task`. The callback may be a coroutine function; it is called on the loop."""
        poll = timeout is not None and timeout <= 0
        operation = operations.wait_task(task_id, callback, poll, self._values)
        return self._hand(await self._run(operation, timeout=self._timeout if poll else timeout))

    async def watch_task(
        self, task_id: str, timeout: float | None = None, callback: Callable[[TaskInfo], object] | None = None
    ) -> TaskInfo:
        """See :meth:`Client.watch_task`, and for the callback :meth:`wait_for_task`."""
        poll = timeout is not None and timeout <= 0
        operation = operations.watch_task(task_id, callback, poll)
        return await self._run(operation, timeout=self._timeout if poll else timeout)

    async def cancel_task(self, task_id: str) -> bool:
        """See :meth:`Client.cancel_task`."""
        return await self._run(operations.cancel_task(task_id))

    async def list_tasks(self, status: str | None = None) -> list[TaskInfo]:
        """See :meth:`Client.list_tasks`."""
        return await self._run(operations.list_tasks(status))

    async def create_buffer(
        self,
        shape_or_nbytes: int | Sequence[int],
        dtype: torch.dtype | str = "uint8",
        device: torch.device | str | None = None,
        *,
        zero: bool = False,
        ttl: float | None = None,
        max_accesses: int | None = None,
        keep: bool = False,
    ) -> AsyncHandle[torch.Tensor]:
        """See :meth:`Client.create_buffer`."""
        operation = buffers.create(shape_or_nbytes, dtype, device, zero, ttl, max_accesses, keep, self._values)
        return self._hand(await self._run(operation))  # type: ignore[no-any-return]

    async def get_buffer(self, buffer_id: str) -> AsyncHandle[torch.Tensor]:
        """See :meth:`Client.get_buffer`."""
        return self._hand(await self._run(buffers.get(buffer_id, self._values)))  # type: ignore[no-any-return]

    async def free_buffer(self, buffer: AsyncHandle[Any] | str) -> bool:
        """See :meth:`Client.free_buffer`."""
        return await self._run(buffers.free(buffer if isinstance(buffer, str) else buffer.object_id))

    async def list_devices(self) -> list[dict[str, Any]]:
        """See :meth:`Client.list_devices`."""
        return await self._run(buffers.list_devices())

    async def open_ticket(self, ticket: Ticket | str | os.PathLike[str]) -> AsyncHandle[Any]:
        """See :meth:`Client.open_ticket`."""
        found = await anyio.to_thread.run_sync(read_ticket, ticket)
        return self._hand(await self._run(tickets.open_ticket(found, self._values)))  # type: ignore[no-any-return]

    async def release(self, handle: AsyncHandle[Any] | str) -> bool:
        """See :meth:`Client.release`."""
        return await self.release_many([handle]) == 1

    async def release_many(self, handles: Iterable[AsyncHandle[Any] | str]) -> int:
        """See :meth:`Client.release_many`."""
        object_ids = forgone(handles)
        count = await self._run(operations.release(object_ids)) if object_ids else 0
        await _drain()
        return count

    async def get_object_info(self, handle: AsyncHandle[Any] | str) -> dict[str, Any]:
        """See :meth:`Client.get_object_info`."""
        return await self.object_info(handle if isinstance(handle, str) else handle.object_id)

    async def ensure_handle_live(self, handle: AsyncHandle[Any]) -> None:
        """See :meth:`Client.ensure_handle_live`."""
        handle._check_held()
        try:
            await self._run(operations.handle_state(handle.object_id, handle.server_id, self.socket_path))
        except (ConnectError, ConnectionClosed) as error:
            raise unreachable(handle.server_id, error) from error

    async def invalidate_call_cache(self, endpoint: str, /, *args: Any, **kwargs: Any) -> int:
        """See :meth:`Client.invalidate_call_cache`."""
        server = await self._server()
        return await self._run(operations.invalidate_call(endpoint, args, kwargs, server.device))

    async def invalidate_endpoint_cache(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""
        return await self._run(operations.invalidate_endpoint(endpoint))

    async def reload(
        self, objects: Literal["changed", "all", "none"] = "changed", timeout: float | None = None
    ) -> dict[str, Any]:
        """See :meth:`Client.reload`."""
        return await self._run(operations.reload(objects), timeout=timeout)

    async def stop_server(self, if_idle: bool = False, timeout: float | None = 10.0) -> dict[str, Any]:
        """See :meth:`Client.stop_server`."""
        await self._server()
        with ProcessExit(self.socket_path) as process_exit:
            held = await self._run(operations.stop_server(if_idle))
            await anyio.to_thread.run_sync(process_exit.wait, timeout)
        return held

    async def close(self) -> None:
        """See :meth:`Client.close`."""
        self._closed = True
        self._unwatch()
        channel, session = self._channel, self._session
        self._channel, self._session = None, None
        if channel is not None:
            channel.say_goodbye()
        if session is not None:  # on a GPU it waits for the device
            await anyio.to_thread.run_sync(session.lane.close)
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    # What a handle asks of whoever issued it.

    async def agive_back(self, object_id: str, session: object) -> None:
        """See :class:`shared_rpc.handle.AsyncIssuer`."""
        channel = self._channel
        if session is not self._session or channel is None:
            return
        with suppress(SharedRPCError):  # the connection is gone, and the session's leases with it
            await channel.exchange(Request(m.Release([object_id]), "release"))
            await _drain()

    def give_back(self, object_id: str, session: object) -> None:
        """See :class:`shared_rpc.handle.Giver`. Away from the loop: over a connection of its own, in the same session."""
        if session is self._session and isinstance(session, Session):
            with suppress(SharedRPCError, OSError):
                self._tell(session, m.Release([object_id]))

    def _lane(self) -> Lane | None:
        return self._session.lane if self._session is not None else None

    def _give_chunks_back(self, chunks: list[int]) -> None:
        if self._session is not None:
            self._tell(self._session, m.Free(chunks))

    def _tell(self, session: Session, message: m.Message) -> None:
        connection = Connection(self.socket_path).open(session.token, 1.0)
        try:
            connection.exchange(Request(message, "a message"), time.monotonic() + 1.0)
        finally:
            connection.close()

    async def object_info(self, object_id: str) -> dict[str, Any]:
        """See :class:`shared_rpc.handle.AsyncIssuer`."""
        return await self._run(operations.object_info(object_id))

    # Driving operations.

    def _hand(self, outcome: tuple[m.Result, Any]) -> Any:
        message, value = outcome
        session = self._session
        if not message.managed:
            return value
        if session is None:
            raise ConnectionClosed("this client was closed, and the lease went with it")
        handle = AsyncHandle(
            value,
            object_id=message.object_id,
            server_id=session.server_id,
            generation=message.generation,
            issuer=self,
            session=session,
        )
        self._leases.add(handle)
        return handle

    async def _run(self, operation: Operation[T], *, timeout: float | None = OWN_TIMEOUT) -> T:
        limit = self._limit(timeout)
        deadline = anyio.current_time() + limit if limit is not None else math.inf
        advance = functools.partial(operation.send, None)
        try:
            while True:
                # Around this alone: an endpoint may raise StopIteration too.
                try:
                    step = advance()
                except StopIteration as stop:
                    return cast("T", stop.value)
                if isinstance(step, Request):
                    try:
                        advance = functools.partial(operation.send, await self._exchange(step, deadline))
                    except (SharedRPCError, LaneClosed) as error:
                        advance = functools.partial(operation.throw, error)
                    continue
                if isinstance(step, Tell):
                    if self._channel is not None:
                        self._channel.tell(step.message)
                    advance = functools.partial(operation.send, None)
                    continue
                try:
                    # No name for it here: code that runs below may keep this frame.
                    advance = functools.partial(
                        operation.send, await (_worked(step) if isinstance(step, Work) else _notified(step))
                    )
                except BaseException as error:
                    advance = functools.partial(operation.throw, error)
        finally:
            operation.close()
            # It may hold an error whose frames hold this one, and the caller's tensors with it.
            del advance

    async def _exchange(self, request: Request, deadline: float) -> Reply:
        if request.at_once:
            deadline = max(deadline, anyio.current_time() + PROMPT)
        while True:
            channel: Channel | None = None
            with anyio.CancelScope(deadline=deadline):
                channel = await self._connected()
            if channel is None:
                raise too_late(request.what)
            if request.lane is not None and request.lane.closed:
                raise LaneClosed
            try:
                return await channel.exchange(request, deadline)
            except ConnectionClosed:
                # Where the server went away and the request can be repeated, it goes to the one that comes.
                if self._closed or not request.repeatable or anyio.current_time() > deadline:
                    raise

    async def _server(self) -> Session:
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
            if self._channel is None:
                self._channel = await self._connect()
            return self._channel

    async def _connect(self) -> Channel:
        search = Search(self.socket_path, self._connect_timeout)
        while True:
            try:
                channel, takeover = await self._join(search.path)
                break
            except ConnectError as error:
                await anyio.sleep(search.failed(error))
        if self._closed:
            channel.close()
            raise ConnectionClosed("this client is closed")
        if not takeover.joined:
            ended, self._session = self._session, takeover.begin(self._new_lane())
            unwanted = takeover.move(self._session)
            if unwanted:
                channel.tell(m.Release(unwanted))
            if ended is not None:
                await anyio.to_thread.run_sync(ended.lane.close)
        return channel

    async def _join(self, path: str) -> tuple[Channel, Takeover]:
        """Have a channel join the session, or begin another one, which has its leases then.

        :raises ConnectError: if there is no server, or it goes away at once.
        """
        session = self._session
        token = session.token if session is not None else ""
        channel = await Channel.open(path, token, self._timeout if self._timeout is not None else 3600.0)
        try:
            takeover = Takeover(self._leases, session, channel.welcome)
            if takeover.moving:
                with takeover.renewal(path) as request:
                    takeover.held = held_of(await channel.exchange(request, anyio.current_time() + PROMPT))
        except BaseException:
            channel.close()
            raise
        return channel, takeover


def _leave(channel: Channel | None, session: Session) -> None:
    if channel is not None:
        channel.say_goodbye()
    session.lane.close()


async def _worked(step: Work) -> Any:
    if step.nbytes is not None and step.nbytes <= _QUICK and "shared_rpc.codec" in sys.modules:
        return step.function()
    work = ShieldedThreadJob(step.function)
    try:
        await anyio.to_thread.run_sync(work.run)
    except anyio.get_cancelled_exc_class():
        # By a scope it is cancelled when the thread has ended, by asyncio's own Task.cancel() at once.
        if await work.stop() and step.undo is not None:
            step.undo(work.result())
        raise
    return work.result()


async def _notified(step: Notify) -> None:
    result = step.callback(step.info)
    if inspect.isawaitable(result):
        await result


async def _drain() -> None:
    # On a GPU it waits for the device.
    if MAPPINGS.has_unused:
        await anyio.to_thread.run_sync(MAPPINGS.drain)
