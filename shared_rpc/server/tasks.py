"""Tasks in operation: a task waits for a run like a caller, and requests wait for the task."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any

import msgspec

from shared_rpc.errors import DeadlineExceeded, ServerBusy, TaskCancelled, TaskError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import CallArguments, Run
from shared_rpc.observability.events import HOOKS, TaskChanged
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.options import ServeOptions
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import TaskInfo, TaskStatus
from shared_rpc.server.requests import Answer, Caller, handles
from shared_rpc.server.runs import Runs
from shared_rpc.server.shared import State
from shared_rpc.server.state.leases import TaskHolder
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.state.tasks import Task, TaskTable
from shared_rpc.server.tiers import Tiers
from shared_rpc.server.waiting import Delivery, Waiter, resolve

#: Bytes. A task keeps only type, message and traceback of an exception with a larger pickle.
_EXCEPTION_LIMIT = 1 << 14
#: Tasks per page.
_PAGE = 1000


class Watcher(msgspec.Struct, eq=False):
    """A request that waits for a task's end, and with ``events`` is notified of every earlier change.

    ``holds`` is True if its session gets a lease on the result at the end; ``held`` is the id of that object then.
    """

    caller: Caller
    events: bool
    holds: bool
    held: str = ""
    ended: asyncio.Future[None] = msgspec.field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Tasks:
    """All tasks of a server. On its loop only.

    :param first: the number of the first task, see :class:`TaskTable`.
    """

    def __init__(self, state: State, runs: Runs, tiers: Tiers, options: ServeOptions, first: int) -> None:
        self._result_ttl = options.result_ttl
        self.table: TaskTable[Waiter] = TaskTable(
            state.server_id, state.clock, self.forget, result_ttl=options.result_ttl, capacity=options.max_tasks, first=first
        )
        self._state = state
        self._runs = runs
        self._tiers = tiers

    def submit(
        self,
        spec: EndpointSpec,
        key: str | None,
        arguments: CallArguments,
        asker: Waiter,
    ) -> Task[Waiter]:
        """Make a task of a call; one with a cached result has ended on return.

        :param arguments: this object takes ownership of their descriptors, unless it raises.
        :param asker: the waiter of the submitting request, whose call is observed.
        :raises ServerBusy: if there are too many tasks.
        """
        try:
            task = self.table.add(spec.name, key)
        except ServerBusy:
            self._runs.statistics.of(spec.name)["errors"] += 1
            raise
        waiter = task.waiter = Waiter(
            "",
            functools.partial(self._ended, task),
            task=task.holder,
            follow=functools.partial(self._follow, task),
            request_id=asker.request_id,
            observed=asker.observed,
        )
        self._emit(task)
        self._runs.enter(waiter, spec, key, arguments, frozenset())
        return task

    # Requests.

    @handles(m.GetTask)
    def get(self, caller: Caller, message: m.GetTask) -> m.Answer:
        """Describe one task."""
        return m.Answer.of(self.info(self.table.get(message.task_id)))

    @handles(m.WaitTask)
    async def wait(self, caller: Caller, message: m.WaitTask) -> None:
        """Answer when a task has ended, and report earlier changes.

        :raises TaskError: if the task is unknown.
        :raises DeadlineExceeded: with ``poll``, if it has not ended.
        """
        task = self.table.get(message.task_id)
        if message.poll and not task.finished:
            raise DeadlineExceeded(f"task {message.task_id} of {task.info.endpoint!r} is still {task.info.status}")
        if message.events:
            caller.notify(m.TaskUpdate(self.info(task)))
        watcher = Watcher(caller, message.events, not message.look)
        task.watchers[watcher] = None
        if task.finished:
            self._end_watches(task)
        try:
            await watcher.ended
            if message.look:
                caller.reply(m.TaskIs(task.info))
            elif (answering := self._answer(caller, task)) is not None:
                await answering
        finally:
            task.watchers.pop(watcher, None)
            if watcher.held:
                self._state.release(caller.session, [watcher.held])

    @handles(m.FetchTask)
    def fetch(self, caller: Caller, message: m.FetchTask) -> Answer:
        """Answer with a task's result.

        :raises TaskError: if the task is unknown, or has not ended.
        """
        task = self.table.get(message.task_id)
        if not task.finished:
            raise TaskError(
                f"task {message.task_id} of {task.info.endpoint!r} is {task.info.status}, and has no result yet: use "
                f"wait_for_task()",
                reason="unfinished",
            )
        return self._answer(caller, task)

    def _answer(self, caller: Caller, task: Task[Waiter]) -> Coroutine[Any, Any, None] | None:
        """Answer with the result of an ended task, or with its error."""
        if task.failure is not None:
            caller.fail(task.failure)
            return None
        stored = self._result(task)
        if stored.cold:
            return self._restore(caller, stored, task.info.task_id)
        self._give(caller, stored, task.info.task_id)
        return None

    async def _restore(self, caller: Caller, stored: StoredObject, task_id: str) -> None:
        self._state.leases.grant(caller.session, stored.object_id)  # another taker ends the task's lease
        try:
            async with self._tiers.warm(caller.waiter, stored):
                self._give(caller, stored, task_id)
        finally:
            self._state.release(caller.session, [stored.object_id])

    @handles(m.ListTasks)
    def list_page(self, caller: Caller, message: m.ListTasks) -> m.Answer:
        """Describe a page of tasks."""
        infos, following = self.table.page(message.status, message.after, _PAGE)
        users: dict[str, str] = {}
        return m.Answer.of(([self.info(self.table.get(info.task_id), users) for info in infos], following))

    @handles(m.CancelTask)
    def cancel_for(self, caller: Caller, message: m.CancelTask) -> m.Answer:
        """Cancel a task, or ask it to stop."""
        return m.Answer.of(self.cancel(self.table.get(message.task_id)))

    # Tasks.

    def info(self, task: Task[Waiter], users: dict[str, str] | None = None) -> TaskInfo:
        """Describe a task and the capacity that it waits for; for ``users`` see :meth:`Capacity.why`."""
        why = self._state.waits_for(task.waiter, users) if task.waiter is not None else ""
        return msgspec.structs.replace(task.info, waits_for=why) if why else task.info

    def _give(self, caller: Caller, stored: StoredObject, task_id: str) -> None:
        """Deliver a result, whose lease passes from the task to the client."""
        if stored.managed:
            self._state.leases.grant(caller.session, stored.object_id)
        caller.deliver(Delivery(stored.record, stored.live, stored, stored.managed))
        self._state.release(TaskHolder(task_id), [stored.object_id])

    def _result(self, task: Task[Waiter]) -> StoredObject:
        stored = self._state.objects.get(task.info.object_id or "")
        if stored is None:
            raise TaskError(
                f"the result of task {task.info.task_id} was already fetched, and not kept: call {task.info.endpoint!r} again; "
                f"managed handles and the cache keep a result longer",
                reason="released",
            )
        return stored

    def _end_watches(self, task: Task[Waiter]) -> None:
        """Wake the watchers of an ended task. They hold the result, since another one may take it first."""
        watchers, task.watchers = task.watchers, {}
        stored = self._state.objects.get(task.info.object_id or "")
        for watcher in watchers:
            if watcher.holds and stored is not None:
                watcher.held = stored.object_id
                self._state.leases.grant(watcher.caller.session, stored.object_id)
            if not watcher.ended.done():
                watcher.ended.set_result(None)

    # The ends of tasks.

    def cancel(self, task: Task[Waiter]) -> bool:
        """Cancel a task, or ask it to stop if it runs; return False if it had ended.

        A run with other waiters continues: the task leaves it.
        """
        if task.finished:
            return False
        waiter = task.waiter
        assert waiter is not None, "a task that has not ended has a waiter"
        run = waiter.run
        if run is not None and run.running and not run.over and len(run.waiters) == 1:
            if not task.info.cancel_requested:
                self.table.update(task, cancel_requested=True)
                self._runs.ask_to_stop(run)
                self._notify_watchers(task)
            return True
        self._runs.leave(waiter)
        self.table.update(task, cancel_requested=True)
        resolve(waiter, Failure.of(TaskCancelled(f"task {task.info.task_id} of {task.info.endpoint!r} was cancelled")))
        return True

    def _ended(self, task: Task[Waiter], outcome: Delivery | Failure) -> None:
        if isinstance(outcome, Failure):
            task.failure = failure = outcome.remembered(_EXCEPTION_LIMIT)
            if failure.code == TaskCancelled.code and task.info.cancel_requested:
                self._change(task, TaskStatus.CANCELLED)
            else:
                self._change(task, TaskStatus.FAILED, error_type=failure.type_name, error_message=failure.text)
        else:
            assert outcome.stored is not None, "a task's result is a stored object"
            self._change(task, TaskStatus.COMPLETED, object_id=outcome.stored.object_id)
        self._end_watches(task)

    def forget(self, task: Task[Waiter]) -> None:
        """Release the result of a task that has expired or was fetched."""
        if task.info.object_id is not None:
            self._state.release(task.holder, [task.info.object_id])

    def _change(self, task: Task[Waiter], status: TaskStatus, **facts: object) -> None:
        self.table.advance(task, status, **facts)
        self._emit(task)
        self._notify_watchers(task)
        if status.finished:
            # A task is remembered for long, without its run.
            task.waiter = None
            self._state.wake_within(self._result_ttl)

    def _emit(self, task: Task[Waiter]) -> None:
        """Report a task's status to hooks."""
        if HOOKS.registered:
            HOOKS.emit(
                TaskChanged(
                    server_id=self.table.issuer,
                    task_id=task.info.task_id,
                    endpoint=task.info.endpoint,
                    status=task.info.status.value,
                    request_id=task.waiter.request_id if task.waiter is not None else "",
                )
            )

    def _follow(self, task: Task[Waiter], run: Run[Waiter]) -> None:
        """Copy the status and the progress of a task's run."""
        if task.info.status is TaskStatus.PENDING:
            self._change(task, TaskStatus.RUNNING)
        if run.progress is not None:
            self.table.update(task, progress=run.progress)
            self._notify_watchers(task)

    def _notify_watchers(self, task: Task[Waiter]) -> None:
        for watcher in tuple(task.watchers):
            if watcher.events:
                watcher.caller.notify(m.TaskUpdate(self.info(task)))
