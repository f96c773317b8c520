"""Tasks."""

from __future__ import annotations

from shared_rpc.execution.outcomes import Failure
from shared_rpc.protocol import messages as m
from shared_rpc.server.handlers.table import Caller, handles
from shared_rpc.server.runs import Delivery

#: Tasks in one page.
_PAGE = 1000


@handles(m.Submit)
def submit(caller: Caller, message: m.Submit) -> m.TaskIs:
    lowered, arguments = caller.arguments(message)
    return m.TaskIs(caller.core.submit(message.endpoint, lowered, arguments, caller.name, caller.session))


@handles(m.GetTask)
def get_task(caller: Caller, message: m.GetTask) -> m.TaskIs:
    tasks = caller.core.tasks
    return m.TaskIs(tasks.info(tasks.table.get(message.task_id)))


@handles(m.WaitTask)
def wait_task(caller: Caller, message: m.WaitTask) -> None:
    tasks, waiter = caller.core.tasks, caller.wait()

    def show(outcome: Delivery | Failure) -> None:
        if caller.core.stopped and isinstance(outcome, Failure):
            caller.fail(outcome)  # no watcher will ask for more
        else:
            caller.reply(m.TaskIs(tasks.table.get(message.task_id).info))

    if message.events:
        waiter.on_event = lambda info: caller.notify(m.TaskUpdate(info))
    if message.look:
        waiter.looks, waiter.claims, waiter.deliver = True, message.claim, show
    tasks.wait(waiter, message.task_id, poll=message.poll)


@handles(m.FetchTask)
def fetch_task(caller: Caller, message: m.FetchTask) -> None:
    caller.core.tasks.fetch(caller.wait(), message.task_id, message.claimed)


@handles(m.ListTasks)
def list_tasks(caller: Caller, message: m.ListTasks) -> m.TaskPage:
    limit = min(max(message.limit, 1), _PAGE)
    return m.TaskPage(*caller.core.tasks.page(message.status, message.after, limit))


@handles(m.CancelTask)
def cancel_task(caller: Caller, message: m.CancelTask) -> m.Count:
    tasks = caller.core.tasks
    return m.Count(int(tasks.cancel(tasks.table.get(message.task_id))))
