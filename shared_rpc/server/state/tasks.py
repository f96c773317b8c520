"""Tasks: runs that outlive the request that started them.

::

    pending ──► running ──► completed | failed | cancelled
       └──────────────────► completed (from the cache) | failed | cancelled

A finished task is remembered for ``result_ttl`` seconds. Its id contains the issuing server and a sequence number, which
distinguishes an expired task from one that never existed.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from shared_rpc.errors import ServerBusy, TaskError
from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
from shared_rpc.server.state import Clock
from shared_rpc.server.state.leases import TaskHolder

W = TypeVar("W")

#: The permitted next statuses of each status.
TRANSITIONS: dict[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.PENDING: frozenset(TaskStatus) - {TaskStatus.PENDING},
    TaskStatus.RUNNING: frozenset({TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED}),
    TaskStatus.COMPLETED: frozenset(),
    TaskStatus.FAILED: frozenset(),
    TaskStatus.CANCELLED: frozenset(),
}

#: Maximum characters of an error's message in a task's status; the error itself is sent whole.
_SHOWN = 2000


class Task(msgspec.Struct, Generic[W], eq=False):
    """One task. ``watchers`` wait for its end, and are notified of every change.

    ``ended_at`` is on the table's clock. ``waiter`` waits for the task's run, None once that has ended; it is opaque here, as
    are the watchers and ``failure``.
    """

    info: TaskInfo
    number: int
    ended_at: float = 0.0
    watchers: dict[Any, None] = msgspec.field(default_factory=dict)
    waiter: W | None = None
    failure: Any = None

    @property
    def finished(self) -> bool:
        """True if it has ended."""
        return self.info.status.finished

    @property
    def holder(self) -> TaskHolder:
        """The holder of the result until a client fetches it."""
        return TaskHolder(self.info.task_id)


class TaskTable(Generic[W]):
    """All tasks of a server; ``W`` is the type of their waiters.

    :param issuer: the prefix of these tasks' ids, the server's id.
    :param on_forget: called with every finished task that is forgotten.
    :param result_ttl: seconds a finished task is remembered.
    :param capacity: maximum number of unfinished tasks.
    :param remembered: maximum number of finished tasks that are remembered; the oldest are forgotten first.
    :param first: the number of the first task; lower ones belong to an earlier server of the same id.
    """

    def __init__(
        self,
        issuer: str,
        clock: Clock,
        on_forget: Callable[[Task[W]], None],
        *,
        result_ttl: float = 3600.0,
        capacity: int = 1000,
        remembered: int = 10_000,
        first: int = 1,
    ) -> None:
        self.issuer = issuer
        self._clock = clock
        self._on_forget = on_forget
        self._result_ttl = result_ttl
        self._capacity = capacity
        self._remembered = remembered
        self._first = first
        self._issued = first - 1
        self._tasks: dict[str, Task[W]] = {}
        self._counts = {status.value: 0 for status in TaskStatus}
        #: Finished tasks, in the order of their ends.
        self._finished: OrderedDict[str, Task[W]] = OrderedDict()

    def add(self, endpoint: str, cache_key: str | None) -> Task[W]:
        """Create a pending task.

        :raises ServerBusy: if the capacity is exhausted.
        """
        if len(self._tasks) - len(self._finished) >= self._capacity:
            raise ServerBusy(
                f"{self._capacity} tasks are pending or running, the limit of this server (max_tasks): wait for one to end"
            )
        self._issued += 1
        info = TaskInfo(
            task_id=f"{self.issuer}-{self._issued}",
            endpoint=endpoint,
            status=TaskStatus.PENDING,
            created_at=self._clock.unix(self._clock.now()),
            cache_key=cache_key,
        )
        task = self._tasks[info.task_id] = Task(info, self._issued)
        self._counts[info.status.value] += 1
        return task

    def advance(self, task: Task[W], status: TaskStatus, **facts: Any) -> None:
        """Change a task's status; ``facts`` are further fields of its :class:`TaskInfo`.

        :raises ValueError: for a change that is not in :data:`TRANSITIONS`.
        """
        if status not in TRANSITIONS[task.info.status]:
            raise ValueError(f"task {task.info.task_id} cannot go from {task.info.status} to {status}")
        now = self._clock.now()
        if status is TaskStatus.RUNNING:
            facts["started_at"] = self._clock.unix(now)
        if status.finished:
            facts["finished_at"] = self._clock.unix(now)
            task.ended_at = now
            self._finished[task.info.task_id] = task
        if facts.get("error_message"):
            facts["error_message"] = facts["error_message"][:_SHOWN]
        self._counts[task.info.status.value] -= 1
        self._counts[status.value] += 1
        task.info = msgspec.structs.replace(task.info, status=status, **facts)
        while len(self._finished) > self._remembered:
            self._forget(next(iter(self._finished.values())))

    def update(self, task: Task[W], **facts: Progress | bool) -> None:
        """Record progress (``progress``), or a request to stop (``cancel_requested``)."""
        task.info = msgspec.structs.replace(task.info, **facts)

    def get(self, task_id: str) -> Task[W]:
        """Return a task by id.

        :raises TaskError: if it is unknown, expired, or another server's.
        """
        task = self._tasks.get(task_id)
        if task is not None:
            return task
        number = task_id[:100].rpartition("-")[2]
        # Only the form of submit()'s ids: int() accepts other forms too.
        known = number.isdecimal() and self._first <= int(number) <= self._issued
        if known and task_id == f"{self.issuer}-{int(number)}":
            raise TaskError(
                f"task {task_id} has expired: a finished task is remembered for {self._result_ttl:g} s (result_ttl), "
                f"and the last {self._remembered} of them",
                reason="expired",
            )
        raise TaskError(
            f"this server has no task {task_id[:100]!r}: use an id returned by submit() of the server that runs now",
            reason="unknown",
        )

    def expire(self) -> float | None:
        """Forget tasks that ended ``result_ttl`` ago; return the seconds until the next one expires, None for never."""
        now = self._clock.now()
        while self._finished:
            task = next(iter(self._finished.values()))
            left = task.ended_at + self._result_ttl - now
            if left > 0:
                return left
            self._forget(task)
        return None

    def page(self, status: TaskStatus | None, after: int, limit: int) -> tuple[list[TaskInfo], int | None]:
        """List tasks in order of creation, those after number ``after``: ``(infos, next after or None)``."""
        later = (task for task in self._tasks.values() if task.number > after and status in (None, task.info.status))
        found = list(itertools.islice(later, limit + 1))
        return [task.info for task in found[:limit]], found[limit - 1].number if len(found) > limit else None

    def counts(self) -> dict[str, int]:
        """Return the number of tasks of each status."""
        return dict(self._counts)

    def _forget(self, task: Task[W]) -> None:
        del self._tasks[task.info.task_id], self._finished[task.info.task_id]
        self._counts[task.info.status.value] -= 1
        self._on_forget(task)

    def __iter__(self) -> Iterator[Task[W]]:
        return iter(tuple(self._tasks.values()))

    def __len__(self) -> int:
        return len(self._tasks)
