"""Tasks at work: a task waits for a run as a caller does, and others wait for the task."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable

import msgspec

from shared_rpc.errors import DeadlineExceeded, TaskCancelled, TaskError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.observability.events import HOOKS, TaskChanged
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
from shared_rpc.server.requests import Caller, handles
from shared_rpc.server.runs import CallArguments, Delivery, Waiter, close_arguments, tell
from shared_rpc.server.shared import State
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.state.tasks import TASK_SESSION, Task, TaskTable

__all__ = ["Tasks"]

_log = logging.getLogger("shared_rpc.server")

#: Bytes. Of an exception that pickles larger, a task keeps the type, message and traceback.
_EXCEPTION_LIMIT = 1 << 14
#: Tasks in one page.
_PAGE = 1000


class Tasks:
    """All tasks of a server. On its loop only.

    :param changed: called when a task ended: there may be one more to expire.
    :param waits_for: returns which capacity a waiter waits for, see :meth:`Core.waits_for`.
    """

    def __init__(
        self,
        state: State,
        table: TaskTable[Waiter],
        changed: Callable[[], None],
        waits_for: Callable[[Waiter, dict[str, str]], str],
    ) -> None:
        self.table = table
        self._state = state
        self._runs = state.runs
        self._changed = changed
        self._waits_for = waits_for

    def submit(
        self,
        spec: EndpointSpec,
        key: str | None,
        arguments: CallArguments,
        chain: frozenset[str] = frozenset(),
        asker: Waiter | None = None,
        *,
        kept: bool = True,
    ) -> Task[Waiter]:
        """Make a task of a call; one whose result is cached has ended when this returns.

        :param arguments: descriptors in them belong to this object now.
        :param asker: whose request it is, and whose call is observed.
        :param kept: False for the task behind a call: a result without waiters is not kept to be fetched.
        :raises ServerBusy: if there are too many.
        """
        try:
            self.table.check_capacity()
        except BaseException:
            close_arguments(arguments)
            self._runs.statistics.of(spec.name)["errors"] += 1
            raise
        task = self.table.add(spec.name, key, kept=kept)
        waiter = task.waiter = Waiter(
            task.session,
            functools.partial(self._ended, task),
            keeps=True,
            on_begin=lambda: self._change(task, TaskStatus.RUNNING),
            on_progress=lambda progress: self._note(task, progress),
        )
        if asker is not None:
            waiter.request_id, waiter.observed = asker.request_id, asker.observed
        self._emit(task)
        self._runs.enter(waiter, spec, key, arguments, chain)
        return task

    # Requests.

    @handles(m.GetTask)
    def get(self, caller: Caller, message: m.GetTask) -> m.TaskIs:
        """Describe one task."""
        return m.TaskIs(self.info(self.table.get(message.task_id)))

    @handles(m.WaitTask)
    def wait_for(self, caller: Caller, message: m.WaitTask) -> None:
        """Answer when a task has ended, and report its changes before."""
        waiter = caller.wait()

        def show(outcome: Delivery | Failure) -> None:
            if self._state.stopped and isinstance(outcome, Failure):
                caller.fail(outcome)  # no watcher will ask for more
            else:
                caller.reply(m.TaskIs(self.table.get(message.task_id).info))

        if message.events:
            waiter.on_event = lambda info: caller.notify(m.TaskUpdate(info))
        if message.look:
            waiter.looks, waiter.claims, waiter.deliver = True, message.claim, show
        self.wait(waiter, message.task_id, poll=message.poll)

    @handles(m.FetchTask)
    def fetch_for(self, caller: Caller, message: m.FetchTask) -> None:
        """Answer with a task's result."""
        self.fetch(caller.wait(), message.task_id, message.claimed)

    @handles(m.ListTasks)
    def list_page(self, caller: Caller, message: m.ListTasks) -> m.TaskPage:
        """Describe a page of tasks."""
        return m.TaskPage(*self.page(message.status, message.after, min(max(message.limit, 1), _PAGE)))

    @handles(m.CancelTask)
    def cancel_for(self, caller: Caller, message: m.CancelTask) -> m.Count:
        """Cancel a task, or ask it to stop."""
        return m.Count(int(self.cancel(self.table.get(message.task_id))))

    # Tasks.

    def info(self, task: Task[Waiter]) -> TaskInfo:
        """Describe a task, with the capacity that it waits for."""
        return self._info(task, {})

    def page(self, status: TaskStatus | None, after: int, limit: int) -> tuple[list[TaskInfo], int | None]:
        """List tasks, see :meth:`TaskTable.page`."""
        infos, following = self.table.page(status, after, limit)
        users: dict[str, str] = {}
        return [self._info(self.table.get(info.task_id), users) for info in infos], following

    def _info(self, task: Task[Waiter], users: dict[str, str]) -> TaskInfo:
        why = self._waits_for(task.waiter, users) if task.waiter is not None else ""
        return msgspec.structs.replace(task.info, waits_for=why) if why else task.info

    def wait(self, waiter: Waiter, task_id: str, *, poll: bool = False) -> None:
        """Tell the waiter how the task ends, at once where it has ended, and before that of every change.

        :param poll: do not wait.
        :raises TaskError: if the task is not known.
        :raises DeadlineExceeded: with ``poll``, if it has not ended.
        """
        task = self.table.get(task_id)
        if poll and not task.finished:
            raise DeadlineExceeded(f"task {task_id} of {task.info.endpoint!r} is still {task.info.status}")
        self.watch(waiter, task)

    def fetch(self, waiter: Waiter, task_id: str, claimed: str = "") -> None:
        """Tell the waiter how the task ended.

        :param claimed: the object that its session claimed, if it did; it is there though the task may have expired since.
        :raises TaskError: if the task is not known, or has not ended.
        """
        stored = self._state.objects.get(claimed)
        if stored is not None and waiter.session in self._state.leases.holders(claimed):
            if stored.cold:
                self._state.tiers.when_warm(waiter, stored, lambda: self.fetch(waiter, task_id, claimed))
                return
            if stored.managed:
                self._state.leases.grant(waiter.session, claimed)
            tell(waiter, Delivery(stored.record, stored.live, stored, stored.managed))
            self._state.release(waiter.session, [claimed])
            self._state.release(f"{TASK_SESSION}{task_id}", [claimed])
            return
        task = self.table.get(task_id)
        if not task.finished:
            raise TaskError(
                f"task {task_id} of {task.info.endpoint!r} is {task.info.status}, and has no result yet: use wait_for_task()",
                reason="unfinished",
            )
        self.watch(waiter, task)

    def watch(self, waiter: Waiter, task: Task[Waiter]) -> None:
        """Wait for a task that is at hand, see :meth:`wait`."""
        if waiter.on_event is not None and not (waiter.looks and task.finished):
            waiter.on_event(self.info(task))
        if task.finished:
            self._deliver(task, [waiter])
        else:
            waiter.task = task
            task.watchers[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter. A task that only a call was waiting for, and which has not begun, is dropped."""
        task, waiter.task = waiter.task, None
        if task is None or task.finished:
            return
        task.watchers.pop(waiter, None)
        if not task.kept and not task.watchers and task.info.status is TaskStatus.PENDING:
            self.cancel(task)

    def cancel(self, task: Task[Waiter]) -> bool:
        """Cancel a task, or ask it to stop where it runs; False if it had ended.

        A run that others wait for too goes on: the task leaves it.
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
        failure = Failure.of(TaskCancelled(f"task {task.info.task_id} of {task.info.endpoint!r} was cancelled"))
        if waiter.observed is not None:
            waiter.observed.told(failure)
        self._end(task, failure)
        return True

    def _ended(self, task: Task[Waiter], outcome: Delivery | Failure) -> None:
        if isinstance(outcome, Failure):
            self._end(task, outcome.remembered(_EXCEPTION_LIMIT))
            return
        assert outcome.stored is not None, "a task's result is a stored object"
        self._change(task, TaskStatus.COMPLETED, object_id=outcome.stored.object_id)
        self._deliver(task, task.watchers)
        if not task.kept:
            self.forget(task)

    def _end(self, task: Task[Waiter], failure: Failure) -> None:
        cancelled = failure.code == TaskCancelled.code and task.info.cancel_requested
        if cancelled:
            self._change(task, TaskStatus.CANCELLED)
        else:
            self._change(task, TaskStatus.FAILED, error_type=failure.type_name, error_message=failure.text)
        task.failure = failure
        self._deliver(task, task.watchers)

    def _deliver(self, task: Task[Waiter], waiters: Iterable[Waiter]) -> None:
        """Report how the task ended. A fetched result is kept by the client, not by the task."""
        waiters, task.watchers = list(waiters), {}
        outcome = task.failure or self._result(task)
        takers = [waiter for waiter in waiters if not waiter.looks]
        if isinstance(outcome, Delivery) and outcome.stored is not None and outcome.stored.cold:
            for waiter in takers:
                self._deliver_warm(task, waiter, outcome.stored)
            takers, waiters = [], [waiter for waiter in waiters if waiter.looks]
        if isinstance(outcome, Delivery) and outcome.stored is not None:
            for waiter in waiters:
                if waiter.claims or (outcome.managed and not waiter.looks):
                    self._state.leases.grant(waiter.session, outcome.stored.object_id)
        for waiter in waiters:
            waiter.task = None
            tell(waiter, outcome)
        if takers and isinstance(outcome, Delivery):
            self.forget(task)

    def _deliver_warm(self, task: Task[Waiter], waiter: Waiter, stored: StoredObject) -> None:
        """Deliver a cold result when it is restored. Its session holds it until then: another taker ends the task's lease."""

        def release(failure: Failure | None = None) -> None:
            self._state.release(waiter.session, [stored.object_id])

        def then() -> None:
            self._deliver(task, [waiter])
            release()

        waiter.task = None
        self._state.leases.grant(waiter.session, stored.object_id)
        self._state.tiers.when_warm(waiter, stored, then, release)

    def _result(self, task: Task[Waiter]) -> Delivery | Failure:
        stored = self._state.objects.get(task.info.object_id or "")
        if stored is None:
            return Failure.of(
                TaskError(
                    f"the result of task {task.info.task_id} was fetched, and not kept since: call "
                    f"{task.info.endpoint!r} again; managed handles and the cache keep a result longer",
                    reason="released",
                )
            )
        return Delivery(stored.record, stored.live, stored, stored.managed)

    def forget(self, task: Task[Waiter]) -> None:
        """Give up the result of a task that has expired, or whose result was fetched."""
        if task.info.object_id is not None:
            self._state.release(task.session, [task.info.object_id])

    def _change(self, task: Task[Waiter], status: TaskStatus, **facts: object) -> None:
        self.table.advance(task, status, **facts)
        self._emit(task)
        self._notify_watchers(task)
        if status.finished:
            # A task is remembered for long, without its run.
            task.waiter = None
            self._changed()

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

    def _note(self, task: Task[Waiter], progress: Progress) -> None:
        self.table.update(task, progress=progress)
        self._notify_watchers(task)

    def _notify_watchers(self, task: Task[Waiter]) -> None:
        for waiter in tuple(task.watchers):
            if waiter.on_event is not None and not (waiter.looks and task.finished):
                try:
                    waiter.on_event(self.info(task))
                except Exception:
                    _log.exception("the callback of a waiter of session %s for a task failed", waiter.session)
