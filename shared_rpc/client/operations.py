"""Every operation of a client, once; see :mod:`shared_rpc.client.steps` for how they are driven."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from shared_rpc.client.lane import Lane, LaneClosed
from shared_rpc.client.steps import Notify, Operation, Reply, Request, Tell, Work
from shared_rpc.errors import (
    ConnectError,
    DeadlineExceeded,
    ProtocolError,
    SegmentNotFound,
    ServerBusy,
    StaleHandleError,
)
from shared_rpc.memory.borrowing import Borrower
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Pool, PoolClosed, PoolFull
from shared_rpc.memory.segments import Segment
from shared_rpc.records import Arguments
from shared_rpc.wire import messages as m
from shared_rpc.wire.tasks import TaskInfo, TaskStatus
from shared_rpc.wire.values import encode, lower_call

__all__ = [
    "Result",
    "call",
    "cancel_task",
    "fetch",
    "fetch_task",
    "handle_state",
    "invalidate_call",
    "invalidate_endpoint",
    "list_endpoints",
    "list_objects",
    "list_tasks",
    "object_info",
    "ping",
    "release",
    "server_info",
    "submit",
    "task_result",
    "task_status",
    "wait_task",
    "watch_task",
]


def _ask(request: Request, kind: type[m.Message]) -> Operation[Any]:
    """Send a request whose reply is of one kind and carries no descriptors."""
    reply: Reply = yield request
    reply.frame.close()
    if not isinstance(reply.message, kind):
        raise ProtocolError(f"the server answered {request.what} with {type(reply.message).__name__}")
    return reply.message


def ping() -> Operation[None]:
    """One round trip."""
    yield from _ask(Request(m.Ping(), "ping"), m.Pong)


def server_info() -> Operation[dict[str, Any]]:
    """Facts about the server."""
    facts = yield from _ask(Request(m.GetServerInfo(), "get_server_info"), m.Facts)
    return dict(facts.facts)


def list_endpoints() -> Operation[dict[str, dict[str, Any]]]:
    """The options of every endpoint, by name."""
    reply = yield from _ask(Request(m.ListEndpoints(), "list_endpoints"), m.Endpoints)
    return {spec.name: msgspec.to_builtins(spec) for spec in reply.endpoints}


def list_objects() -> Operation[list[dict[str, Any]]]:
    """Facts about every object, with ``cached`` and its ``holders`` (session, pid, connections)."""
    reply = yield from _ask(Request(m.ListObjects(), "list_objects"), m.FactsList)
    return list(reply.items)


def object_info(object_id: str) -> Operation[dict[str, Any]]:
    """Facts about one object."""
    reply = yield from _ask(Request(m.GetObjectInfo(object_id), "get_object_info"), m.Facts)
    return dict(reply.facts)


def release(object_ids: Iterable[str]) -> Operation[int]:
    """Give leases back; how many the session held."""
    reply = yield from _ask(Request(m.Release(list(object_ids)), "release"), m.Count)
    return int(reply.count)


def invalidate_call(endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Operation[int]:
    """Drop the cached result of one call; 1 if there was one."""
    arguments = yield from _lower(args, kwargs, device, "")
    arguments.close()  # only what tells the call from others is needed
    message = m.InvalidateCall(endpoint, *_encoded(arguments))
    reply = yield from _ask(Request(message, f"invalidate_call_cache({endpoint!r})"), m.Count)
    return int(reply.count)


def invalidate_endpoint(endpoint: str) -> Operation[int]:
    """Drop all cached results of an endpoint; how many there were."""
    reply = yield from _ask(Request(m.InvalidateEndpoint(endpoint), f"invalidate_endpoint_cache({endpoint!r})"), m.Count)
    return int(reply.count)


#: The pools of the session that a client has now.
Lanes = Callable[[], Lane | None]


def _no_lane() -> None:
    return None


@dataclass(slots=True)
class Result:
    """A result that is not rebuilt yet. It owns its segments' descriptors, see :meth:`close`."""

    message: m.Result
    skeleton: bytes
    segments: list[Segment]
    loans: dict[int, Borrower] = field(default_factory=dict)

    def close(self) -> None:
        """Close the descriptors, and give back the chunks of the server's pool that nothing has used."""
        for segment in self.segments:
            segment.close()
        for chunk, borrower in self.loans.items():
            borrower.unused([chunk])
        self.loans = {}

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch(
    endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str = "", lanes: Lanes = _no_lane
) -> Operation[Result]:
    """Call an endpoint and take its record, without rebuilding the value. Needs torch only for tensors in arguments.

    :param device: the id of the server's device.
    :param server: its own id, by which it is known whether it keeps an argument's memory itself; ``""`` to send all of it.
    :param lanes: the pools of the current session, None to do without.
    """
    what = f"{endpoint}()"
    reply, lane = yield from _send(m.Call, endpoint, args, kwargs, device, server, what, lanes)
    return _result(what, reply, lane)


def call(
    endpoint: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    values: MutableMapping[str, Any],
    server: str = "",
    lanes: Lanes = _no_lane,
) -> Operation[tuple[m.Result, Any]]:
    """Call an endpoint: ``(message, value)``. Where the value cannot be rebuilt, its lease is given back.

    :param values: the values that live in this process, by object id.
    """
    return (yield from _valued((yield from fetch(endpoint, args, kwargs, device, server, lanes)), values))


def submit(endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str = "") -> Operation[str]:
    """Make a task of a call: its id."""
    what = f"submit({endpoint!r})"
    reply, _ = yield from _send(m.Submit, endpoint, args, kwargs, device, server, what, _no_lane)
    reply.frame.close()
    if not isinstance(reply.message, m.TaskIs):
        raise ProtocolError(f"the server answered {what} with {type(reply.message).__name__}")
    return reply.message.info.task_id


def task_status(task_id: str) -> Operation[TaskInfo]:
    """A task now."""
    reply = yield from _ask(Request(m.GetTask(task_id), f"get_task_status({task_id!r})"), m.TaskIs)
    info: TaskInfo = reply.info
    return info


def fetch_task(task_id: str, callback: Callable[[TaskInfo], object] | None, poll: bool) -> Operation[Result]:
    """Wait for a task and take its record, without rebuilding the value.

    :param callback: is told of every change. If it raises, the result was not taken.
    :param poll: do not wait.
    """
    what = f"wait_for_task({task_id!r})"
    if callback is None:
        return _result(what, (yield Request(m.WaitTask(task_id, poll=poll), what)))
    info = yield from _watched(what, task_id, callback, poll, claim=True)
    return _result(what, (yield Request(m.FetchTask(task_id, info.object_id or ""), what, at_once=True)))


def watch_task(task_id: str, callback: Callable[[TaskInfo], object], poll: bool) -> Operation[TaskInfo]:
    """Wait for a task to end, and leave its result to others; for the parameters see :func:`fetch_task`."""
    return (yield from _watched(f"the wait for task {task_id}", task_id, callback, poll, claim=False))


def _watched(
    what: str, task_id: str, callback: Callable[[TaskInfo], object], poll: bool, *, claim: bool
) -> Operation[TaskInfo]:
    message = m.WaitTask(task_id, events=True, poll=poll, look=True, claim=claim)
    reply = yield from _ask(Request(message, what, on_event=callback), m.TaskIs)
    info: TaskInfo = reply.info
    try:
        yield Notify(callback, info)
    except BaseException:
        if claim and info.object_id is not None:
            yield Tell(m.Release([info.object_id]))
        raise
    return info


def wait_task(
    task_id: str, callback: Callable[[TaskInfo], object] | None, poll: bool, values: MutableMapping[str, Any]
) -> Operation[tuple[m.Result, Any]]:
    """Wait for a task: ``(message, value)``; for the parameters see :func:`fetch_task` and :func:`call`."""
    return (yield from _valued((yield from fetch_task(task_id, callback, poll)), values))


def task_result(task_id: str, values: MutableMapping[str, Any]) -> Operation[tuple[m.Result, Any]]:
    """The result of a task that has ended: ``(message, value)``; see :func:`call`."""
    what = f"get_task_result({task_id!r})"
    result = _result(what, (yield Request(m.FetchTask(task_id), what)))
    return (yield from _valued(result, values))


def cancel_task(task_id: str) -> Operation[bool]:
    """Cancel a task, or ask it to stop; False if it had ended."""
    reply = yield from _ask(Request(m.CancelTask(task_id), f"cancel_task({task_id!r})"), m.Count)
    return bool(reply.count)


def list_tasks(status: str | None) -> Operation[list[TaskInfo]]:
    """All tasks of a status, page by page.

    :raises ValueError: for a status that there is not.
    """
    chosen = TaskStatus(status) if status is not None else None
    infos: list[TaskInfo] = []
    after: int | None = 0
    while after is not None:
        page = yield from _ask(Request(m.ListTasks(chosen, after), "list_tasks"), m.TaskPage)
        infos += page.infos
        after = page.after
    return infos


def _send(
    kind: type[m.Call],
    endpoint: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    server: str,
    what: str,
    lanes: Lanes,
) -> Operation[tuple[Reply, Lane | None]]:
    while True:
        lane = lanes()
        try:
            arguments = yield from _lower(args, kwargs, device, server, lane, what)
            return (yield from _send_lowered(kind, endpoint, arguments, what, lane)), lane
        except (LaneClosed, PoolClosed):
            continue
        except SegmentNotFound as error:
            # An object was dropped meanwhile, or another server has come.
            if not MAPPINGS.disown(error.segments):
                raise
        except PoolFull as full:
            assert lane is not None, "there is a pool"
            yield from _await_room(lane, what, str(full))


def _send_lowered(kind: type[m.Call], endpoint: str, arguments: Arguments, what: str, lane: Lane | None) -> Operation[Reply]:
    freed = lane.to_give_back() if lane is not None else []
    try:
        message = kind(
            endpoint,
            *_encoded(arguments),
            table=msgspec.Raw(arguments.table),
            segments=[segment.info for segment in arguments.segments],
            skeletons=[len(skeleton) for skeleton in arguments.skeletons],
            kept=[number for number, segment in enumerate(arguments.segments) if segment.closed],
            arenas=list(arguments.arenas),
            chunks=list(arguments.chunks),
            held=list(arguments.held),
            freed=freed,
            pooled=lane is not None,
        )
        arenas = {number: arguments.segments[number] for number in arguments.arenas}
        fds = tuple(
            segment.fileno() for number, segment in enumerate(arguments.segments) if not segment.closed and number not in arenas
        )
        reply: Reply = yield Request(message, what, b"".join(arguments.skeletons), fds, arenas=arenas, lane=lane)
        return reply
    except ConnectError:
        # It was not sent.
        if lane is not None:
            lane.arguments.give(arguments.chunks)
            lane.borrower.put_back(freed)
        raise
    finally:
        arguments.close()


def _await_room(lane: Lane, what: str, why: str) -> Operation[None]:
    """Until the server gives chunks of this client's pool back.

    :raises ServerBusy: if it does not in time.
    """
    try:
        free = yield from _ask(Request(m.AwaitFree(), what, lane=lane), m.Free)
    except DeadlineExceeded as error:
        raise ServerBusy(f"{what}: {why}") from error
    lane.arguments.give(free.chunks)


def _result(what: str, reply: Reply, lane: Lane | None = None) -> Result:
    message, frame = reply.message, reply.frame
    kept = len(message.kept) if isinstance(message, m.Result) else 0
    if not isinstance(message, m.Result) or len(message.segments) != len(frame.fds) + kept or (kept and lane is None):
        frame.close()
        raise ProtocolError(f"the server answered {what} with {type(message).__name__}, which does not fit")
    if lane is None:
        segments = [Segment(info, fd) for info, fd in zip(message.segments, frame.take_fds(), strict=True)]
        return Result(message, frame.payload, segments)
    lane.arguments.give(message.freed)
    segments = lane.segments(message.segments, message.kept, frame.take_fds())
    return Result(message, frame.payload, segments, dict.fromkeys(message.chunks, lane.borrower))


def _valued(result: Result, values: MutableMapping[str, Any]) -> Operation[tuple[m.Result, Any]]:
    object_id = result.message.object_id
    known = values.get(object_id)
    if known is not None:
        result.close()
        return result.message, known
    try:
        nbytes = len(result.skeleton) + len(result.message.table)
        value = yield Work(lambda: _rebuild(result, values), nbytes)
    except (Exception, KeyboardInterrupt):
        if result.message.managed:
            yield from release([object_id])
        raise
    return result.message, value


def _rebuild(result: Result, values: MutableMapping[str, Any]) -> Any:
    from shared_rpc.codec import decode_result

    with result:
        loans, result.loans = result.loans, {}
        value = decode_result(result.skeleton, result.message.table, result.segments, result.message.owner, loans)
        if result.message.object_id:
            with suppress(TypeError):  # lists, tuples and dicts have no weak references, and are made anew
                return values.setdefault(result.message.object_id, value)
        return value


class _HasMemory(Exception):
    """An argument needs the codec."""


def _lower(
    args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str, lane: Lane | None = None, what: str = ""
) -> Operation[Arguments]:
    """The arguments as they travel: plain data without torch; with tensors, modules and dtypes through the codec."""
    try:
        return Arguments(*lower_call(args, kwargs, _no_memory))
    except _HasMemory:
        pass
    pool = lane.arguments if lane is not None else None
    arguments: Arguments = yield Work(lambda: _encode_all(args, kwargs, device, server, pool, f"arguments of {what}"))
    return arguments


def _no_memory(value: Any, path: str) -> NoReturn:
    raise _HasMemory(path)


def _encode_all(
    args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str, pool: Pool | None, purpose: str
) -> Arguments:
    from shared_rpc.codec import encode_arguments

    return encode_arguments(args, kwargs, device_kind(device), server, pool, purpose)


def handle_state(object_id: str, server_id: str, path: str) -> Operation[None]:
    """Return if the server that issued a handle still owns its object.

    :raises StaleHandleError: if not.
    """
    info = yield from server_info()
    if info["server_id"] != server_id:
        raise StaleHandleError(
            f"the handle was issued by server {server_id}, and {info['server_id']} runs at {path} now: call the endpoint again",
            reason="server_changed",
        )
    yield from object_info(object_id)


def _encoded(arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
    return [encode(value) for value in arguments.args], {name: encode(value) for name, value in arguments.kwargs.items()}
