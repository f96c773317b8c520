"""Tasks: calls that continue without their caller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from shared_rpc.client.results import ReceivedResult, result_of
from shared_rpc.client.steps import Operation, Reply, Request, Within, message_of, pages, query
from shared_rpc.client.suspension import Context
from shared_rpc.operations.binding import Steps, operation, take_result
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus

#: Called with every change of a task.
Callback = Callable[[TaskInfo], object]


def fetched(task_id: str) -> Operation[ReceivedResult]:
    """Take the record of an ended task, without rebuilding the value."""
    what = f"get_task_result({task_id!r})"
    return result_of(what, (yield Request(m.FetchTask(task_id), what)))


def _ended(
    task_id: str, what: str, timeout: float | None, callback: Callback | None, *, look: bool = False
) -> Operation[Reply]:
    """Wait for a task to end; return the answer, with ``look`` the state of the task instead of its result."""
    poll = timeout is not None and timeout <= 0
    if not poll:  # else the answer has the client's own timeout
        yield Within(timeout)
    message = m.WaitTask(task_id, events=callback is not None, poll=poll, look=look)
    return cast(Reply, (yield Request(message, what, on_event=callback)))


def _awaited(ctx: Context, task_id: str, timeout: float | None, callback: Callback | None) -> Operation[Any]:
    """Wait for a task to end; return its result."""
    what = f"wait_for_task({task_id!r})"
    return (yield from take_result(ctx, what, (yield from _ended(task_id, what, timeout, callback))))


def _submitted(ctx: Context, endpoint: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Operation[str]:
    what = f"submit({endpoint!r})"
    reply, _ = yield from ctx._sent(m.Submit, endpoint, args, kwargs, what)
    return message_of(reply, what, m.TaskIs).info.task_id


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
        """Submit a task and wait for it; return its result, or with ``wait=False`` its id at once."""
        if wait:
            ctx._check_wait(Request(m.WaitTask(""), f"execute({endpoint!r})"))
        task_id = yield from _submitted(ctx, endpoint, args, kwargs)
        return (yield from _awaited(ctx, task_id, timeout, callback)) if wait else task_id

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
        return (yield from take_result(ctx, what, (yield Request(m.FetchTask(task_id), what))))

    @operation
    def wait_for_task(ctx: Context, task_id: str, timeout: float | None = None, callback: Callback | None = None) -> Steps[Any]:
        """Wait for a task to end; return its result, like :meth:`call`. The task's exception is raised.

        :param timeout: maximum seconds to wait; 0 does not wait, None waits without limit.
        :param callback: called, in this thread, with the current state of the task and with every change of its status or
            progress. Its exception ends the wait, not the task; at the end, a result that can be fetched once is lost. For an
            :class:`AsyncClient` it may be a coroutine function, and is called on the loop.
        :raises DeadlineExceeded: if the task has not ended after ``timeout`` seconds; it continues, and a later wait gets its
            result.
        :raises TaskCancelled: if it was cancelled.
        :raises TaskError: if it is unknown or has expired.
        """
        return (yield from _awaited(ctx, task_id, timeout, callback))

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
        what = f"the wait for task {task_id}"
        return message_of((yield from _ended(task_id, what, timeout, callback, look=True)), what, m.TaskIs).info

    @operation
    def cancel_task(ctx: Context, task_id: str) -> Steps[bool]:
        """Cancel a pending task, or request a running one to stop; return False if it had finished.

        ``cancel_requested`` shows the request, ``status`` the effect. A run with other waiters continues.

        :raises TaskError: if it is unknown or has expired.
        """
        return (yield from query(m.CancelTask(task_id), f"cancel_task({task_id!r})"))

    @operation
    def list_tasks(ctx: Context, status: str | None = None) -> Steps[list[TaskInfo]]:
        """List the tasks remembered by the server, in order of submission; with ``status``, those of one status.

        :raises ValueError: for an unknown status.
        """
        chosen = TaskStatus(status) if status is not None else None
        return (yield from pages(functools.partial(m.ListTasks, chosen), "list_tasks"))
