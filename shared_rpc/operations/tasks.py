"""Tasks: calls that continue without their caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from shared_rpc.client.results import ReceivedResult, result_of
from shared_rpc.client.steps import Notify, Operation, Reply, Request, Within, ask, message_of, query
from shared_rpc.client.suspension import Context
from shared_rpc.operations.binding import Steps, operation, taken
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus

#: Called with every change of a task.
Callback = Callable[[TaskInfo], object]


def fetch_claimed(info: TaskInfo) -> Operation[ReceivedResult]:
    """Take the record of a task that this session has claimed by :func:`watched`, without rebuilding the value."""
    what = _waiting(info.task_id)
    return result_of(what, (yield _claimed(info, what)))


def _claimed(info: TaskInfo, what: str) -> Request:
    return Request(m.FetchTask(info.task_id, info.object_id or ""), what, at_once=True)


def _waiting(task_id: str) -> str:
    return f"wait_for_task({task_id!r})"


def _ended(task_id: str, callback: Callback | None, poll: bool) -> Operation[Reply]:
    what = _waiting(task_id)
    if callback is None:
        return cast(Reply, (yield Request(m.WaitTask(task_id, poll=poll), what)))
    info = yield from watched(task_id, callback, poll, what=what, claim=True)
    return cast(Reply, (yield _claimed(info, what)))


def watched(task_id: str, callback: Callback | None, poll: bool, *, what: str = "", claim: bool = False) -> Operation[TaskInfo]:
    """Wait for a task to end, without fetching its result.

    :param callback: called with every change.
    :param poll: do not wait.
    :param claim: have the session hold the result, so that it can be fetched then.
    """
    callback = callback or _unheard
    message = m.WaitTask(task_id, events=True, poll=poll, look=True, claim=claim)
    reply = yield from ask(Request(message, what or f"the wait for task {task_id}", on_event=callback), m.TaskIs)
    info: TaskInfo = reply.info
    yield Notify(callback, info)
    return info


def _unheard(_: TaskInfo) -> None:
    """Ignore a change, for a waiter without a callback."""


def _submitted(ctx: Context, endpoint: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Operation[str]:
    what = f"submit({endpoint!r})"
    reply, _ = yield from ctx._sent(m.Submit, endpoint, args, kwargs, what)
    return message_of(reply, what, m.TaskIs).info.task_id


def _polls(timeout: float | None) -> Operation[bool]:
    """Set the timeout of a wait; return True if it is 0, so that the answer has the client's own timeout."""
    poll = timeout is not None and timeout <= 0
    if not poll:
        yield Within(timeout)
    return poll


class TaskOperations:
    """Tasks."""

    @operation
    def submit(ctx: Context, endpoint: str, /, *args: Any, **kwargs: Any) -> Steps[str]:
        """Run an endpoint as a task, which continues without this client; return the task's id.

        The task uses the cache and joins a run like :meth:`call`; the task of a cached result ends at once.

        :raises ServerBusy: if the server has reached ``max_tasks``.
        """
        return (yield from _submitted(ctx, endpoint, args, kwargs))

    @operation
    def execute(
        ctx: Context,
        endpoint: str,
        /,
        *args: Any,
        wait: bool = True,
        timeout: float | None = None,
        callback: Callback | None = None,
        **kwargs: Any,
    ) -> Steps[Any]:
        """Submit a task, and with ``wait`` :meth:`wait_for_task`; return its result, or without ``wait`` its id."""
        task_id = yield from _submitted(ctx, endpoint, args, kwargs)
        if not wait:
            return task_id
        poll = yield from _polls(timeout)
        return (yield from taken(ctx, _waiting(task_id), (yield from _ended(task_id, callback, poll))))

    @operation
    def get_task_status(ctx: Context, task_id: str) -> Steps[TaskInfo]:
        """Return the current state of a task.

        :raises TaskError: if it is unknown or has expired.
        """
        return (yield from query(m.GetTask(task_id), f"get_task_status({task_id!r})"))

    @operation
    def get_task_result(ctx: Context, task_id: str) -> Steps[Any]:
        """Return the result of an ended task, like :meth:`call`; the task's exception is raised.

        Any client of the same user may fetch it. An uncached result that is not managed can be fetched once, a managed one
        while a process holds a handle of it.

        :raises TaskError: if the task is unknown, has expired or not ended, or its result was fetched and released.
        """
        what = f"get_task_result({task_id!r})"
        return (yield from taken(ctx, what, (yield Request(m.FetchTask(task_id), what))))

    @operation
    def wait_for_task(ctx: Context, task_id: str, timeout: float | None = None, callback: Callback | None = None) -> Steps[Any]:
        """Wait for a task to end; return its result, like :meth:`call`. The task's exception is raised.

        :param timeout: maximum seconds to wait; 0 does not wait, None waits without limit.
        :param callback: called, in this thread, with the present state of the task and with every change of its status or
            progress. Its exception ends the wait, not the task. For an :class:`AsyncClient` it may be a coroutine
            function, and is called on the loop.
        :raises DeadlineExceeded: if the task has not ended after ``timeout`` seconds; it continues, and a later wait gets its
            result.
        :raises TaskCancelled: if it was cancelled.
        :raises TaskError: if it is unknown or has expired.
        """
        poll = yield from _polls(timeout)
        return (yield from taken(ctx, _waiting(task_id), (yield from _ended(task_id, callback, poll))))

    @operation
    def watch_task(
        ctx: Context, task_id: str, timeout: float | None = None, callback: Callback | None = None
    ) -> Steps[TaskInfo]:
        """Wait for a task to finish without fetching its result; return its final state.

        Nothing is mapped, and no exception of the endpoint is raised: :meth:`get_task_result` does both.

        :param timeout: see :meth:`wait_for_task`, also for ``callback``.
        :raises DeadlineExceeded: if it has not ended after ``timeout`` seconds.
        :raises TaskError: if it is unknown or has expired.
        """
        poll = yield from _polls(timeout)
        return (yield from watched(task_id, callback, poll))

    @operation
    def cancel_task(ctx: Context, task_id: str) -> Steps[bool]:
        """Cancel a pending task, or request a running one to stop; return False if it had finished.

        ``cancel_requested`` shows the request, ``status`` the effect. A run with other waiters continues.

        :raises TaskError: if it is unknown or has expired.
        """
        reply = yield from ask(Request(m.CancelTask(task_id), f"cancel_task({task_id!r})"), m.Count)
        return bool(reply.count)

    @operation
    def list_tasks(ctx: Context, status: str | None = None) -> Steps[list[TaskInfo]]:
        """List the tasks remembered by the server, in order of submission; with ``status``, those of one status.

        :raises ValueError: for an unknown status.
        """
        chosen = TaskStatus(status) if status is not None else None
        infos: list[TaskInfo] = []
        after: int | None = 0
        while after is not None:
            page, after = yield from query(m.ListTasks(chosen, after), "list_tasks")
            infos += page
        return infos
