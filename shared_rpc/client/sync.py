"""The blocking client: plain blocking sockets, safe to use from many threads."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from shared_rpc.client import buffers, operations, tickets
from shared_rpc.client.base import OWN_TIMEOUT
from shared_rpc.client.connection import PROMPT
from shared_rpc.client.lane import Lane, LaneClosed
from shared_rpc.client.monitoring import Monitoring
from shared_rpc.client.pool import ConnectionPool, Turn
from shared_rpc.client.process_exit import ProcessExit
from shared_rpc.client.refreshing import Refreshing
from shared_rpc.client.session import Session
from shared_rpc.client.steps import Operation, Request, Tell, Work
from shared_rpc.errors import ConnectError, ConnectionClosed, SharedRPCError
from shared_rpc.handle import Handle, forgone, unreachable
from shared_rpc.lifecycle.finalizer import Job, weakly
from shared_rpc.lifecycle.interrupts import is_interrupt, is_of_handler, passed_over
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.tasks import TaskInfo
from shared_rpc.protocol.ticket import Ticket, read_ticket

if TYPE_CHECKING:
    import torch

__all__ = ["Client"]

T = TypeVar("T")

#: Seconds of a client without a timeout: ten years.
_FOREVER = 10 * 365 * 86400.0


class Client(Refreshing, Monitoring):
    """Calls the endpoints of a server on this host.

    Every thread that waits has a connection of its own, so one call does not hold up another. All connections share
    one session, which ends with :meth:`close`, with the last reference to the client and to its handles, or with the process;
    its leases go back then. After a fork the child
    starts a session of its own. The client connects with its first operation.

    :param base_path: where the sockets are, see :func:`shared_rpc.settings.resolve_base_path`.
    :param device: which server's: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` or ``"GPU-<uuid>"``.
    :param socket_path: the server's socket itself; base path and device are not looked at then.
    :param timeout: seconds an operation may take; None for no limit.
    :param connect_timeout: seconds to wait for a server that is not there yet.
    :param pool: how much memory arguments may take until the server has done with them.
    """

    def _begin(self) -> None:
        self._pool = ConnectionPool(self._address.path, self._lanes(), self._leases, weakly(self._moved))

    def _leaves(self) -> Job | None:
        # There is no pool where the client could not be made.
        pool = getattr(self, "_pool", None)
        return pool.close if pool is not None and pool.has_sessions else None

    def _after_fork(self) -> None:
        super()._after_fork()
        self._pool.abandon(self._leases)

    def ping(self) -> float:
        """One round trip; the seconds it took."""
        begin = time.perf_counter()
        self._run(operations.ping())
        return time.perf_counter() - begin

    def get_server_info(self) -> dict[str, Any]:
        """The server's id, pid, device, socket path, uptime (seconds), endpoints and counters."""
        return self._run(operations.server_info())

    def list_endpoints(self) -> dict[str, dict[str, Any]]:
        """The options of every endpoint, by name."""
        return self._run(operations.list_endpoints())

    def list_objects(self) -> list[dict[str, Any]]:
        """:meth:`get_object_info` of every object, with ``cached`` and its ``holders`` (session, pid, connections)."""
        return self._run(operations.list_objects())

    def call(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint: a :class:`Handle` where it is managed, else its result, over the server's own memory.

        While a tensor or module of this call's object lives in this process, the same one is returned again, as it would be
        without a server.

        An exception that the endpoint raised is raised here with its own type, and the remote traceback as its cause.

        :raises EndpointNotFound: if the server has none of that name.
        :raises TypeError: if the arguments do not fit its signature.
        :raises CapabilityError: if an argument or the result cannot be shared.
        :raises DeadlineExceeded: after the client's timeout; a run that has begun goes on in the server.
        :raises ConnectError: if no server comes up in time.
        :raises ConnectionClosed: if the server goes away meanwhile.
        """
        server = self._server()
        operation = operations.call(endpoint, args, kwargs, server.device, self._values, server.server_id, self._lane)
        return self._take(operation)

    def submit(self, endpoint: str, /, *args: Any, **kwargs: Any) -> str:
        """Have an endpoint run as a task, which goes on without this client: its id.

        It goes through the cache and joins a run as :meth:`call` does; the task of a cached result has ended at once.

        :raises ServerBusy: if the server has as many tasks as it takes.
        """
        server = self._server()
        return self._run(operations.submit(endpoint, args, kwargs, server.device, server.server_id))

    def execute(
        self,
        endpoint: str,
        /,
        *args: Any,
        wait: bool = True,
        timeout: float | None = None,
        callback: Callable[[TaskInfo], object] | None = None,
        **kwargs: Any,
    ) -> Any:
        """:meth:`submit`, and with ``wait`` :meth:`wait_for_task`: the result, else the task's id."""
        task_id = self.submit(endpoint, *args, **kwargs)
        return self.wait_for_task(task_id, timeout, callback) if wait else task_id

    def get_task_status(self, task_id: str) -> TaskInfo:
        """A task now.

        :raises TaskError: if it is unknown or has expired.
        """
        return self._run(operations.task_status(task_id))

    def get_task_result(self, task_id: str) -> Any:
        """The result of a task that has ended, as :meth:`call` would return it; its exception is raised.

        Any client of the same user may fetch it. An uncached result that is not managed can be fetched once, a managed one
        for as long as a handle of it is held.

        :raises TaskError: if the task is unknown, has expired or not ended, or its result was fetched and released.
        """
        return self._take(operations.task_result(task_id, self._values))

    def wait_for_task(
        self, task_id: str, timeout: float | None = None, callback: Callable[[TaskInfo], object] | None = None
    ) -> Any:
        """Wait for a task to end: its result, as :meth:`call` would return it; its exception is raised.

        :param timeout: seconds to wait at most; 0 does not wait, None waits as long as it takes.
        :param callback: is called, in this thread, with the task as it is now and with every change of its status or progress.
            What it raises ends the wait, not the task.
        :raises DeadlineExceeded: in time; the task goes on, and a later wait gets its result.
        :raises TaskCancelled: if it was cancelled.
        :raises TaskError: if it is unknown or has expired.
        """
        poll = timeout is not None and timeout <= 0
        operation = operations.wait_task(task_id, callback, poll, self._values)
        return self._take(operation, timeout=self._timeout if poll else timeout)

    def watch_task(
        self, task_id: str, timeout: float | None = None, callback: Callable[[TaskInfo], object] | None = None
    ) -> TaskInfo:
        """Wait for a task to end, and leave its result to others: how it ended. Nothing is mapped, and no exception of the
        endpoint's raised; :meth:`get_task_result` does both.

        :param timeout: see :meth:`wait_for_task`, as for ``callback``.
        :raises DeadlineExceeded: in time.
        :raises TaskError: if it is unknown or has expired.
        """
        poll = timeout is not None and timeout <= 0
        operation = operations.watch_task(task_id, callback, poll)
        return self._run(operation, timeout=self._timeout if poll else timeout)

    def cancel_task(self, task_id: str) -> bool:
        """Cancel a task that has not begun, or ask one that runs to stop; False if it had ended.

        ``cancel_requested`` of its status tells that it was asked, ``status`` whether it stopped. A run that others wait for
        goes on for them.

        :raises TaskError: if it is unknown or has expired.
        """
        return self._run(operations.cancel_task(task_id))

    def list_tasks(self, status: str | None = None) -> list[TaskInfo]:
        """All tasks that the server remembers, in the order they were submitted; with ``status``, those of one status."""
        return self._run(operations.list_tasks(status))

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
        """New shared memory that belongs to no endpoint, to be read and written by all who have its id.

        The handle's ``value`` is a contiguous tensor over it, and its ``object_id`` what :meth:`get_buffer` takes, in any
        process. Others can get it while somebody holds it: it ends with its last handle, so a process that is killed leaves
        nothing behind. Who hands the id on and ends says for how long it is to be there by ``ttl``, or ``keep=True``.
        It counts against the server's ``max_bytes``, and is never evicted.

        :param shape_or_nbytes: a tuple is a shape; an int is always a number of bytes, whatever the dtype, and must be a whole
            number of elements: ``create_buffer(1024, "float32")`` has 256.
        :param dtype: of the tensor, or its name; quantised ones are not possible.
        :param device: ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` as this process counts, or a GPU's UUID; None for the server's
            own. A GPU's server has all GPUs that it sees, and the host's memory; see :meth:`list_devices`.
        :param zero: whether the memory must be zeros; its content is not specified otherwise.
        :param ttl: seconds for which others can get it, whether or not somebody holds it. It never ends under those who do.
        :param max_accesses: how many times it may be got; this call does not count.
        :param keep: whether it is there though nobody holds it, until :meth:`free_buffer` or the end of the server.
        :raises ConfigurationError: for a size, a dtype, a ``ttl`` or a ``max_accesses`` that cannot be; for both ttl and keep.
        :raises CapabilityError: if the server has no such device, or the device never so much memory.
        :raises ServerBusy: if the device has not so much memory left now, or its quota does not.
        """
        operation = buffers.create(shape_or_nbytes, dtype, device, zero, ttl, max_accesses, keep, self._values)
        return self._take(operation)  # type: ignore[no-any-return]

    def get_buffer(self, buffer_id: str) -> Handle[torch.Tensor]:
        """The buffer of that id, whoever made it: a handle of the same memory, without a copy.

        :raises BufferNotFound: if there is none, or not any more; ``reason`` says why.
        """
        return self._take(buffers.get(buffer_id, self._values))  # type: ignore[no-any-return]

    def free_buffer(self, buffer: Handle[Any] | str) -> bool:
        """Have nobody get a buffer any more; False if nobody could.

        Those who hold it keep it, this process too: memory goes with the last handle.
        """
        return self._run(buffers.free(buffer if isinstance(buffer, str) else buffer.object_id))

    def list_devices(self) -> list[dict[str, Any]]:
        """The devices that the server has memory on.

        Keys: ``id`` (``"cpu"`` or a GPU's UUID), ``kind`` (``"cpu"`` or ``"cuda"``), ``name``, and in bytes ``total``,
        ``free`` (None where that is not known), ``used`` (by the server's objects and buffers), ``limit`` (the quota, or None).
        """
        return self._run(buffers.list_devices())

    def open_ticket(self, ticket: Ticket | str | os.PathLike[str]) -> Handle[Any]:
        """The object of a ticket that :meth:`Handle.ticket` made: a handle with a lease of its own.

        The client must be one of the ticket's server; :meth:`Client.from_ticket` makes one that is.

        :param ticket: a ticket, or the path of its file.
        :raises TicketError: if it cannot be used here; ``reason`` says why.
        :raises StaleHandleError: if the object is gone, with ``reason`` ``"object_gone"``, ``"superseded"`` or
            ``"server_changed"``.
        :raises BufferNotFound: if it is a buffer that is not handed out any more.
        """
        return self._take(tickets.open_ticket(read_ticket(ticket), self._values))  # type: ignore[no-any-return]

    def release(self, handle: Handle[Any] | str) -> bool:
        """Give one lease back, of a handle or an object id; whether this process held it."""
        return self.release_many([handle]) == 1

    def release_many(self, handles: Iterable[Handle[Any] | str]) -> int:
        """Give several leases back in one round trip; how many this process held."""

        def release(turn: Turn) -> int:
            object_ids = forgone(handles)
            return self._drive(operations.release(object_ids), turn, None, OWN_TIMEOUT) if object_ids else 0

        count = self._within(release)
        MAPPINGS.drain()
        return count

    def get_object_info(self, handle: Handle[Any] | str) -> dict[str, Any]:
        """What the server knows of an object, by handle or id; for the keys see :meth:`Handle.get_object_info`.

        :raises StaleHandleError: if the server does not own it.
        """
        return self.object_info(handle if isinstance(handle, str) else handle.object_id)

    def ensure_handle_live(self, handle: Handle[Any]) -> None:
        """Return if the server that issued the handle still owns its object.

        :raises StaleHandleError: if not; ``reason`` is one of those of :class:`StaleHandleError`.
        """
        handle._check_held()
        try:
            self._run(operations.handle_state(handle.object_id, handle.server_id, self.socket_path))
        except (ConnectError, ConnectionClosed) as error:
            raise unreachable(handle.server_id, error) from error

    def invalidate_call_cache(self, endpoint: str, /, *args: Any, **kwargs: Any) -> int:
        """Drop the cached result of one call; 1 if there was one. Handles that are out stay valid."""
        return self._run(operations.invalidate_call(endpoint, args, kwargs, self._server().device))

    def invalidate_endpoint_cache(self, endpoint: str) -> int:
        """Drop all cached results of an endpoint; how many there were. Handles that are out stay valid."""
        return self._run(operations.invalidate_endpoint(endpoint))

    def reload(self, objects: Literal["changed", "all", "none"] = "changed", timeout: float | None = None) -> dict[str, Any]:
        """Have the server's workers read the app's code anew. The old ones serve until the new ones are ready.

        :param objects: which cached objects are dropped: those whose endpoint has ``"changed"``, ``"all"`` or ``"none"``. Who
            holds one keeps it; ``get_object_info`` says ``stale`` of those whose endpoint has changed.
        :param timeout: seconds to wait at most, None for as long as the app takes to load.
        :returns: ``workers``, the process ids of the new ones, and ``services``: by socket path what has ``changed``, how many
            objects were ``dropped``, and the ``endpoints`` there are.
        :raises WorkerCrashed: if the new code cannot be loaded; then nothing has changed.
        :raises ConfigurationError: if the server has no workers.
        """
        return self._run(operations.reload(objects), timeout=timeout)

    def stop_server(self, if_idle: bool = False, timeout: float | None = 10.0) -> dict[str, Any]:
        """Have the server end, as SIGTERM does, and wait until its process is gone. Clients keep the memory that they have.

        :param if_idle: refuse where others are connected, hold a lease, or have a task or a call that has not ended.
        :param timeout: seconds to wait until it is gone, None for as long as it takes.
        :returns: what it held: ``objects``, ``nbytes``, and of others ``clients``, ``leases``, ``tasks`` and ``running``
            endpoints; with its ``pid`` and ``socket_paths``.
        :raises ServerBusy: with ``if_idle``, if others use it.
        :raises ConfigurationError: if it is a part of a process that may do more, such as a script in the server role.
        :raises DeadlineExceeded: if it has not ended in time.
        """
        self._server()
        with ProcessExit(self.socket_path) as process_exit:
            held = self._run(operations.stop_server(if_idle))
            process_exit.wait(timeout)
        return held

    def close(self) -> None:
        """Hang up. The leases go back; tensors stay valid. Every later operation fails."""
        self._unwatch()
        self._pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # What a handle asks of whoever issued it.

    def give_back(self, object_id: str, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        if session is not self._pool.session:
            return
        try:
            self._run(operations.release([object_id]), patience=0)
        except (SharedRPCError, OSError) as error:
            if is_of_handler(error):
                raise
            return  # the connection is gone, and the session's leases with it
        MAPPINGS.drain()

    def _interrupted(self, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        if isinstance(session, Session):
            self._pool.retire_session(session)

    def object_info(self, object_id: str) -> dict[str, Any]:
        """See :class:`shared_rpc.handle.Issuer`."""
        return self._run(operations.object_info(object_id))

    # Driving operations.

    def _lane(self) -> Lane | None:
        session = self._pool.session
        return session.lane if session is not None else None

    def _give_chunks_back(self, chunks: list[int]) -> None:
        self._pool.exchange(Request(m.Free(chunks), "free"), time.monotonic() + PROMPT, 0)

    def _within(self, work: Callable[[Turn], T]) -> T:
        """Do what may be interrupted anywhere, and see to it that nothing is left over then: see :class:`ConnectionPool`."""
        turn = Turn()
        try:
            self._pool.enter(turn)
            return work(turn)
        except BaseException as error:
            if is_interrupt(error):
                self._pool.retire(turn)
            raise
        finally:
            turn.ended = True
            self._pool.leave(turn)

    def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = OWN_TIMEOUT) -> T:
        return self._within(lambda turn: self._drive(operation, turn, patience, timeout))

    def _take(self, operation: Operation[tuple[m.Result, Any]], *, timeout: float | None = OWN_TIMEOUT) -> Any:
        """Run an operation for what its caller gets: a handle, where a lease came with the value."""
        return self._within(lambda turn: self._hand(self._drive(operation, turn, None, timeout), turn))

    def _hand(self, outcome: tuple[m.Result, Any], turn: Turn) -> Any:
        message, value = outcome
        if not message.managed:
            return value
        session = turn.session
        if session is None or self._pool.closed:
            raise ConnectionClosed("this client was closed, and the lease went with it")
        handle = Handle(
            value,
            object_id=message.object_id,
            server_id=session.server_id,
            generation=message.generation,
            issuer=self,
            session=session,
        )
        self._leases.add(handle)
        return handle

    def _drive(self, operation: Operation[T], turn: Turn, patience: float | None, timeout: float | None) -> T:
        deadline = self._deadline(self._limit(timeout))
        advance = functools.partial(operation.send, None)
        try:
            while True:
                # Around this alone: an endpoint may raise StopIteration too.
                try:
                    step = advance()
                except StopIteration as stop:
                    return cast("T", stop.value)
                patience = self._connect_timeout if patience is None else patience
                if isinstance(step, Request):
                    until = max(deadline, time.monotonic() + PROMPT) if step.at_once else deadline
                    try:
                        advance = functools.partial(operation.send, self._pool.exchange(step, until, patience, turn))
                    except (SharedRPCError, LaneClosed) as error:
                        advance = functools.partial(operation.throw, error)
                    continue
                if isinstance(step, Tell):
                    with passed_over(SharedRPCError):
                        self._pool.exchange(Request(step.message, "a message"), time.monotonic() + PROMPT, 0, turn)
                    advance = functools.partial(operation.send, None)
                    continue
                try:
                    # No name for it here: code that runs below may keep this frame.
                    advance = functools.partial(
                        operation.send, step.function() if isinstance(step, Work) else step.callback(step.info)
                    )
                except BaseException as error:
                    advance = functools.partial(operation.throw, error)
        finally:
            operation.close()
            # It may hold an error whose frames hold this one, and the caller's tensors with it.
            del advance

    @staticmethod
    def _deadline(timeout: float | None) -> float:
        return time.monotonic() + (timeout if timeout is not None else _FOREVER)

    def _server(self) -> Session:
        # Known since the first connection: whatever server comes after it at this socket has the same device.
        session = self._pool.session
        if session is None:
            until = self._deadline(self._timeout)
            session = self._within(lambda turn: self._pool.need_session(until, self._connect_timeout, turn))
        return session
