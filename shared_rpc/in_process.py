"""Calls within the process that runs the endpoints: its own, beside those of a server's clients."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

from shared_rpc.context import CURRENT_RUN
from shared_rpc.errors import ConfigurationError, ConnectionClosed, DeadlineExceeded, StaleHandleError
from shared_rpc.handle import Handle
from shared_rpc.in_process_generations import InProcessGenerations
from shared_rpc.memory.devices import device_id, device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment
from shared_rpc.operations.buffers import request_of
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus
from shared_rpc.server.buffers import Buffers
from shared_rpc.server.core import Core
from shared_rpc.server.engine import Engine, PendingCall
from shared_rpc.server.runs import Delivery, Waiter
from shared_rpc.server.state.objects import StoredObject

if TYPE_CHECKING:
    import torch

__all__ = ["InProcessRuntime"]

T = TypeVar("T")


class InProcessRuntime(InProcessGenerations):
    """Every call goes through the core of this process, and gets the live value."""

    def __init__(self, engine: Engine, device: str) -> None:
        self.server_id = engine.core.server_id
        self._engine = engine
        self._device = device
        #: The tensors of buffers that live in this process, by id: one is rebuilt once, as in a client.
        self._values: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`.

        :raises ConfigurationError: on the event loop that endpoints run on, which would wait for itself.
        """
        if self._engine.here():
            raise ConfigurationError(
                f"{endpoint}() was called on the server's event loop, by an async endpoint perhaps: make {endpoint!r} an "
                f"async def and await it, or call it with anyio.to_thread.run_sync"
            )
        with self._wanted(self._begin(endpoint, args, kwargs)) as future, self._waiting():
            return self._hand(future.result())

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`."""
        with self._wanted(self._begin(endpoint, args, kwargs)) as future:
            if self._engine.here():
                return self._hand(await asyncio.wrap_future(future))
            return self._hand(await _waited_for(future))

    @property
    def tasks(self) -> InProcessRuntime:
        """See :class:`shared_rpc.runtime.Runtime`."""
        return self

    @property
    def generations(self) -> InProcessRuntime:
        """See :class:`shared_rpc.runtime.Runtime`."""
        return self

    def submit(self, endpoint: str, /, *args: Any, **kwargs: Any) -> str:
        """See :meth:`Client.submit`."""
        return self._engine.submit(endpoint, self._lowered(args, kwargs), args, kwargs).task_id

    def wait_for_task(
        self, task_id: str, timeout: float | None = None, callback: Callable[[TaskInfo], object] | None = None
    ) -> Any:
        """See :meth:`Client.wait_for_task`.

        :raises ConfigurationError: on the event loop that endpoints run on.
        """
        if self._engine.here():
            raise ConfigurationError("wait_for_task() was called on the server's event loop: use anyio.to_thread.run_sync")
        poll = timeout is not None and timeout <= 0
        until = time.monotonic() + (timeout if timeout is not None and not poll else threading.TIMEOUT_MAX / 2)
        #: What happens to the task, and None at its end.
        events: queue.SimpleQueue[TaskInfo | None] = queue.SimpleQueue()
        pending = self._engine.await_task(
            lambda tasks, waiter: tasks.wait(waiter, task_id, poll=poll), events.put if callback is not None else None
        )
        pending.future.add_done_callback(lambda _: events.put(None))
        with self._wanted(pending) as future, self._waiting():
            while (info := _next(events, until)) is not None:
                if callback is not None:
                    callback(info)
            if not future.done() and pending.withdraw():
                raise DeadlineExceeded(
                    f"task {task_id} did not end within {timeout} s; it goes on, and a later wait gets its result"
                )
            delivery = future.result()
            if callback is None or delivery.stored is None:
                return self._hand(delivery)
        claimed = delivery.stored.object_id
        with self._wanted(self._engine.await_task(lambda tasks, waiter: tasks.fetch(waiter, task_id, claimed))) as future:
            return self._hand(future.result())

    def get_task_status(self, task_id: str) -> TaskInfo:
        """See :meth:`Client.get_task_status`."""
        return self._engine.ask(lambda core: core.tasks.table.get(task_id).info)

    def get_task_result(self, task_id: str) -> Any:
        """See :meth:`Client.get_task_result`."""
        with self._wanted(self._engine.await_task(lambda tasks, waiter: tasks.fetch(waiter, task_id))) as future:
            return self._hand(future.result())

    def cancel_task(self, task_id: str) -> bool:
        """See :meth:`Client.cancel_task`."""
        return self._engine.ask(lambda core: core.tasks.cancel(core.tasks.table.get(task_id)))

    def list_tasks(self, status: str | None = None) -> list[TaskInfo]:
        """See :meth:`Client.list_tasks`."""
        chosen = TaskStatus(status) if status is not None else None
        return self._engine.ask(lambda core: [task.info for task in core.tasks.table if chosen in (None, task.info.status)])

    @property
    def buffers(self) -> InProcessRuntime:
        """See :class:`shared_rpc.runtime.Runtime`."""
        return self

    def create_buffer(
        self,
        shape_or_nbytes: int | Sequence[int],
        dtype: torch.dtype | str = "uint8",
        device: torch.device | str | None = None,
        *,
        zero: bool = False,
        ttl: float | None = None,
        max_accesses: int | None = None,
        keep: bool = False,
    ) -> Handle[torch.Tensor]:
        """See :meth:`Client.create_buffer`."""
        chosen = device_id(str(device)) if device is not None else ""
        message = request_of(shape_or_nbytes, dtype, chosen, zero, ttl, max_accesses, keep)
        pending = self._await_buffer("create_buffer", lambda buffers, waiter: buffers.create(waiter, message))
        try:
            with self._wanted(pending) as future:
                return self._attached(future.result())
        except BaseException:
            with suppress(ConnectionClosed):
                self._engine.post(lambda: _free(self._engine.core.buffers, pending.future))
            raise

    def get_buffer(self, buffer_id: str) -> Handle[torch.Tensor]:
        """See :meth:`Client.get_buffer`."""
        pending = self._await_buffer("get_buffer", lambda buffers, waiter: buffers.get(waiter, buffer_id))
        with self._wanted(pending) as future:
            return self._attached(future.result())

    def free_buffer(self, buffer: Handle[Any] | str) -> bool:
        """See :meth:`Client.free_buffer`."""
        buffer_id = buffer if isinstance(buffer, str) else buffer.object_id
        return self._engine.ask(lambda core: core.buffers.table.free(buffer_id))

    def list_devices(self) -> list[dict[str, Any]]:
        """See :meth:`Client.list_devices`."""

        def begin(buffers: Buffers, waiter: Waiter) -> None:
            buffers.list_devices(waiter, lambda items: waiter.deliver(Delivery(None, items, None, False)))

        with self._wanted(self._await_buffer("list_devices", begin)) as future:
            items: list[dict[str, Any]] = future.result().live
            return items

    def _await_buffer(self, what: str, begin: Callable[[Buffers, Waiter], None]) -> PendingCall:
        if self._engine.here():
            raise ConfigurationError(f"{what}() was called on the server's event loop: use anyio.to_thread.run_sync")
        return self._engine.await_buffer(begin)

    def _attached(self, delivery: Delivery) -> Handle[torch.Tensor]:
        """A handle of a buffer, whose memory is mapped here as in any other process that has it."""
        from shared_rpc.codec import decode_result

        assert delivery.stored is not None and delivery.record is not None, "a buffer is an object with a record"
        object_id, record = delivery.stored.object_id, delivery.record
        value = self._values.get(object_id)
        if value is None:
            # On the loop, which closes them: descriptors of a server that is stopped must not be mistaken for others.
            segments = self._engine.ask(lambda core: _duplicates(core, object_id))
            try:
                # Kept, so that an endpoint of this process can return the buffer itself.
                with MAPPINGS.attach(segments, keep=True, owner=self.server_id):
                    value = decode_result(record.skeleton, record.table, segments, self.server_id)
            finally:
                for segment in segments:
                    segment.close()
            value = self._values.setdefault(object_id, value)
        return self._handle(value, delivery.stored)

    def _begin(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall:
        return self._engine.call(endpoint, self._lowered(args, kwargs), args, kwargs)

    @contextmanager
    def _wanted(self, pending: PendingCall) -> Iterator[concurrent.futures.Future[Delivery]]:
        """A caller that is cancelled or interrupted gives its call up, and leaves no lease behind."""
        try:
            yield pending.future
        except BaseException:
            pending.give_up()
            raise

    def _waiting(self) -> AbstractContextManager[None]:
        """Around a wait: in an endpoint it must not use up the threads that whatever it waits for needs."""
        return self._engine.lend_thread() if CURRENT_RUN.get() is not None else nullcontext()

    def _lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        from shared_rpc.codec import lower_arguments

        return lower_arguments(args, kwargs, device_kind(self._device))

    def _hand(self, delivery: Delivery) -> Any:
        if not delivery.managed or delivery.stored is None:
            return delivery.live
        return self._handle(delivery.live, delivery.stored)

    def _handle(self, value: T, stored: StoredObject) -> Handle[T]:
        return Handle(
            value,
            object_id=stored.object_id,
            server_id=self.server_id,
            generation=stored.generation,
            issuer=self,
            session=self,
        )

    def invalidate_call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """See :meth:`Client.invalidate_call_cache`."""
        lowered = self._lowered(args, kwargs)
        return self._engine.ask(lambda core: core.invalidate_call(endpoint, *lowered))

    def invalidate_endpoint(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""
        return self._engine.ask(lambda core: core.invalidate_endpoint(endpoint))

    def give_back(self, object_id: str, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        self._engine.release(object_id)

    def _interrupted(self, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`. The lease is this process's own, and ends with it."""

    def get_object_info(self, object_id: str) -> dict[str, Any]:
        """See :class:`shared_rpc.handle.Issuer`."""
        return self._engine.ask(lambda core: core.object_info(object_id))

    def ensure_handle_live(self, handle: Handle[Any]) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        handle._check_held()
        try:
            self.get_object_info(handle.object_id)
        except ConnectionClosed as error:
            raise StaleHandleError(str(error), reason="server_unreachable") from error


def _duplicates(core: Core, object_id: str) -> list[Segment]:
    stored = core.objects.get(object_id)
    if stored is None:  # it is leased, so nothing but the end of the server takes it away
        raise ConnectionClosed(f"the server (pid {os.getpid()}) was stopped")
    return [segment.duplicate() for segment in stored.record.segments]


def _free(buffers: Buffers, created: concurrent.futures.Future[Delivery]) -> None:
    """A buffer that was made, and whose id nobody will ever know."""
    if created.done() and created.exception() is None and (stored := created.result().stored) is not None:
        buffers.table.free(stored.object_id)


def _next(events: queue.SimpleQueue[TaskInfo | None], until: float) -> TaskInfo | None:
    """What happened next; None at the end, and when the time is over, whatever else has happened."""
    left = until - time.monotonic()
    try:
        return events.get(timeout=left) if left > 0 else None
    except queue.Empty:
        return None


async def _waited_for(future: concurrent.futures.Future[T]) -> T:
    if future.done():
        return future.result()
    # A limiter of its own: those who wait must not use up the threads that whoever they wait for needs.
    return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
