"""Every operation of a client, once; see :mod:`shared_rpc.client.steps` for how they are driven."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import msgspec

from shared_rpc.client.results import Result, result_of, valued
from shared_rpc.client.sending import Lanes, lower, no_lane, send
from shared_rpc.client.steps import Notify, Operation, Request, Tell, ask
from shared_rpc.errors import ProtocolError, StaleHandleError
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus

__all__ = [
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
    "reload",
    "server_info",
    "stop_server",
    "submit",
    "task_result",
    "task_status",
    "wait_task",
    "watch_task",
]


def ping() -> Operation[None]:
    """One round trip."""
    yield from ask(Request(m.Ping(), "ping", again=True), m.Pong)


def server_info() -> Operation[dict[str, Any]]:
    """Facts about the server."""
    facts = yield from ask(Request(m.GetServerInfo(), "get_server_info", again=True), m.Facts)
    return dict(facts.facts)


def list_endpoints() -> Operation[dict[str, dict[str, Any]]]:
    """The options of every endpoint, by name."""
    reply = yield from ask(Request(m.ListEndpoints(), "list_endpoints", again=True), m.Endpoints)
    return {spec.name: msgspec.to_builtins(spec) for spec in reply.endpoints}


def list_objects() -> Operation[list[dict[str, Any]]]:
    """Facts about every object, with ``cached`` and its ``holders`` (session, pid, connections)."""
    reply = yield from ask(Request(m.ListObjects(), "list_objects", again=True), m.FactsList)
    return list(reply.items)


def object_info(object_id: str) -> Operation[dict[str, Any]]:
    """Facts about one object."""
    reply = yield from ask(Request(m.GetObjectInfo(object_id), "get_object_info", again=True), m.Facts)
    return dict(reply.facts)


def release(object_ids: Iterable[str]) -> Operation[int]:
    """Give leases back; how many the session held."""
    reply = yield from ask(Request(m.Release(list(object_ids)), "release"), m.Count)
    return int(reply.count)


def invalidate_call(endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Operation[int]:
    """Drop the cached result of one call; 1 if there was one."""
    arguments = yield from lower(args, kwargs, device, "")
    arguments.close()  # only what tells the call from others is needed
    message = m.InvalidateCall(endpoint, arguments.args, arguments.kwargs)
    reply = yield from ask(Request(message, f"invalidate_call_cache({endpoint!r})"), m.Count)
    return int(reply.count)


def invalidate_endpoint(endpoint: str) -> Operation[int]:
    """Drop all cached results of an endpoint; how many there were."""
    reply = yield from ask(Request(m.InvalidateEndpoint(endpoint), f"invalidate_endpoint_cache({endpoint!r})"), m.Count)
    return int(reply.count)


def reload(objects: str) -> Operation[dict[str, Any]]:
    """Have the server's workers read the app's code anew."""
    facts = yield from ask(Request(m.Reload(objects), "reload"), m.Facts)
    return dict(facts.facts)


def stop_server(if_idle: bool) -> Operation[dict[str, Any]]:
    """Have the server end: what it held. It is not gone yet."""
    facts = yield from ask(Request(m.StopServer(if_idle), "stop_server"), m.Facts)
    return dict(facts.facts)


def fetch(
    endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str = "", lanes: Lanes = no_lane
) -> Operation[Result]:
    """Call an endpoint and take its record, without rebuilding the value. Needs torch only for tensors in arguments.

    :param device: the id of the server's device.
    :param server: its own id, by which it is known whether it keeps an argument's memory itself; ``""`` to send all of it.
    :param lanes: the pools of the current session, None to do without.
    """
    what = f"{endpoint}()"
    reply, lane, held = yield from send(m.Call, endpoint, args, kwargs, device, server, what, lanes)
    return result_of(what, reply, lane, held)


def call(
    endpoint: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    values: MutableMapping[str, Any],
    server: str = "",
    lanes: Lanes = no_lane,
) -> Operation[tuple[m.Result, Any]]:
    """Call an endpoint: ``(message, value)``. Where the value cannot be rebuilt, its lease is given back.

    :param values: the values that live in this process, by object id.
    """
    return (yield from valued((yield from fetch(endpoint, args, kwargs, device, server, lanes)), values))


def submit(endpoint: str, args: Sequence[Any], kwargs: dict[str, Any], device: str, server: str = "") -> Operation[str]:
    """Make a task of a call: its id."""
    what = f"submit({endpoint!r})"
    reply, _, _ = yield from send(m.Submit, endpoint, args, kwargs, device, server, what, no_lane)
    reply.frame.close()
    if not isinstance(reply.message, m.TaskIs):
        raise ProtocolError(f"the server answered {what} with {type(reply.message).__name__}")
    return reply.message.info.task_id


def task_status(task_id: str) -> Operation[TaskInfo]:
    """A task now."""
    reply = yield from ask(Request(m.GetTask(task_id), f"get_task_status({task_id!r})", again=True), m.TaskIs)
    info: TaskInfo = reply.info
    return info


def fetch_task(task_id: str, callback: Callable[[TaskInfo], object] | None, poll: bool) -> Operation[Result]:
    """Wait for a task and take its record, without rebuilding the value.

    :param callback: is told of every change. If it raises, the result was not taken.
    :param poll: do not wait.
    """
    what = f"wait_for_task({task_id!r})"
    if callback is None:
        return result_of(what, (yield Request(m.WaitTask(task_id, poll=poll), what)))
    info = yield from _watched(what, task_id, callback, poll, claim=True)
    return result_of(what, (yield Request(m.FetchTask(task_id, info.object_id or ""), what, at_once=True)))


def watch_task(task_id: str, callback: Callable[[TaskInfo], object] | None, poll: bool) -> Operation[TaskInfo]:
    """Wait for a task to end, and leave its result to others; for the parameters see :func:`fetch_task`."""
    return (yield from _watched(f"the wait for task {task_id}", task_id, callback or _unheard, poll, claim=False))


def _unheard(_: TaskInfo) -> None:
    """For who wants to know the end alone."""


def _watched(
    what: str, task_id: str, callback: Callable[[TaskInfo], object], poll: bool, *, claim: bool
) -> Operation[TaskInfo]:
    message = m.WaitTask(task_id, events=True, poll=poll, look=True, claim=claim)
    reply = yield from ask(Request(message, what, on_event=callback), m.TaskIs)
    info: TaskInfo = reply.info
    try:
        yield Notify(callback, info)
    except GeneratorExit:
        raise
    except BaseException:
        if claim and info.object_id is not None:
            yield Tell(m.Release([info.object_id]))
        raise
    return info


def wait_task(
    task_id: str, callback: Callable[[TaskInfo], object] | None, poll: bool, values: MutableMapping[str, Any]
) -> Operation[tuple[m.Result, Any]]:
    """Wait for a task: ``(message, value)``; for the parameters see :func:`fetch_task` and :func:`call`."""
    return (yield from valued((yield from fetch_task(task_id, callback, poll)), values))


def task_result(task_id: str, values: MutableMapping[str, Any]) -> Operation[tuple[m.Result, Any]]:
    """The result of a task that has ended: ``(message, value)``; see :func:`call`."""
    what = f"get_task_result({task_id!r})"
    result = result_of(what, (yield Request(m.FetchTask(task_id), what)))
    return (yield from valued(result, values))


def cancel_task(task_id: str) -> Operation[bool]:
    """Cancel a task, or ask it to stop; False if it had ended."""
    reply = yield from ask(Request(m.CancelTask(task_id), f"cancel_task({task_id!r})"), m.Count)
    return bool(reply.count)


def list_tasks(status: str | None) -> Operation[list[TaskInfo]]:
    """All tasks of a status, page by page.

    :raises ValueError: for a status that there is not.
    """
    chosen = TaskStatus(status) if status is not None else None
    infos: list[TaskInfo] = []
    after: int | None = 0
    while after is not None:
        page = yield from ask(Request(m.ListTasks(chosen, after), "list_tasks", again=True), m.TaskPage)
        infos += page.infos
        after = page.after
    return infos


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
