"""The table of tasks: transitions, expiry, and pages. The test sets the clock."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from shared_rpc.errors import ServerBusy, TaskError
from shared_rpc.execution.endpoints import Registry
from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
from shared_rpc.server.core import Core
from shared_rpc.server.state.tasks import TRANSITIONS, Task, TaskTable
from tests.kit.clock import Clock

PENDING, RUNNING = TaskStatus.PENDING, TaskStatus.RUNNING
COMPLETED, FAILED, CANCELLED = TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED
ENDS = [COMPLETED, FAILED, CANCELLED]
#: Every change that a task may make.
ALLOWED = {(PENDING, RUNNING), *product([PENDING, RUNNING], ENDS)}


class Desk:
    """A table, its clock, and the tasks that it forgot."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.forgotten: list[Task[str]] = []
        self.table: TaskTable[str] = TaskTable("server", self.clock, self.forget, **options)

    def forget(self, task: Task[str]) -> None:
        """Record a forgotten task, after the table has removed it."""
        assert task not in list(self.table)
        self.forgotten.append(task)

    def task(self, status: TaskStatus = PENDING) -> Task[str]:
        """Return a new task in a given status."""
        task = self.table.add("f", None)
        if status is not PENDING:
            self.table.advance(task, status)
        return task

    def reason(self, task_id: str) -> str:
        """Return the reason why there is no task of that id."""
        with pytest.raises(TaskError) as caught:
            self.table.get(task_id)
        return caught.value.reason

    def pages(self, limit: int, status: TaskStatus | None = None) -> list[list[str]]:
        """Return the ids of all pages."""
        pages: list[list[str]] = []
        after: int | None = 0
        while after is not None:
            infos, after = self.table.page(status, after, limit)
            pages.append([info.task_id for info in infos])
        return pages


@pytest.fixture
def desk() -> Desk:
    """A table that keeps tasks for ten seconds."""
    return Desk(result_ttl=10.0)


# Statuses.


def test_the_transitions_are_those_of_the_diagram() -> None:
    """Every status has its line, and the final ones have no successor."""
    assert {(before, after) for before, afters in TRANSITIONS.items() for after in afters} == ALLOWED
    assert set(TRANSITIONS) == set(TaskStatus)


# Descriptions of tasks.


def test_long_errors_are_cut(desk: Desk) -> None:
    """A list of tasks must fit into a message; the error itself is sent whole."""
    task, short = desk.task(RUNNING), desk.task(RUNNING)
    desk.table.advance(task, FAILED, error_type="ValueError", error_message="x" * 2000 + "y")
    desk.table.advance(short, FAILED, error_type="ValueError", error_message="")
    assert task.info.error_message == "x" * 2000
    assert short.info.error_message == ""


# How many there may be.


def test_expired_ids_are_reported(desk: Desk) -> None:
    """Distinct from unknown ones, with the time that tasks are remembered."""
    task = desk.task(COMPLETED)
    desk.clock.time += 10
    desk.table.expire()
    with pytest.raises(TaskError, match=r"task server-1 has expired: .* for 10 s \(result_ttl\)") as caught:
        desk.table.get(task.info.task_id)
    assert caught.value.reason == "expired"


def test_ids_are_not_used_again_by_the_next_server_of_the_same_id() -> None:
    """It has recovered the objects, not the tasks: an earlier id is unknown."""
    earlier, later = (Core(Registry(), Mock(), "cpu", server_id="server").tasks.table for _ in range(2))
    task_ids = [earlier.add("f", None).info.task_id for _ in range(3)]
    assert later.add("f", None).info.task_id not in task_ids
    for task_id in task_ids:
        with pytest.raises(TaskError) as caught:
            later.get(task_id)
        assert caught.value.reason == "unknown"


@pytest.mark.parametrize(
    "task_id", ["", "server-", "server-0", "server-²", "other-1", "server-" + "9" * 10_000], ids=lambda text: repr(text[:20])
)
def test_malformed_ids_are_unknown(desk: Desk, task_id: str) -> None:
    """Whether or not this server's tasks have expired; long ones are cut."""
    desk.task(COMPLETED)
    for _ in range(2):
        with pytest.raises(TaskError, match="this server has no task") as caught:
            desk.table.get(task_id)
        assert caught.value.reason == "unknown"
        assert len(str(caught.value)) < 300
        desk.clock.time += 10
        desk.table.expire()


STATUSES = st.sampled_from(TaskStatus)


class TableModel(RuleBasedStateMachine):
    """The table compared with a list of the tasks that it should have: both agree at any time."""

    @initialize(
        capacity=st.sampled_from([1, 3, 100]), remembered=st.sampled_from([1, 3, 100]), result_ttl=st.sampled_from([0.0, 20.0])
    )
    def start(self, capacity: int, remembered: int, result_ttl: float) -> None:
        """Start without tasks."""
        self.capacity, self.remembered, self.result_ttl = capacity, remembered, result_ttl
        self.desk = Desk(capacity=capacity, remembered=remembered, result_ttl=result_ttl)
        #: By id, in the order they were made.
        self.infos: dict[str, TaskInfo] = {}
        self.tasks: dict[str, Task[str]] = {}
        #: In the order they ended.
        self.ended: list[str] = []
        self.forgotten: list[str] = []
        self.pages: list[str] = []
        self.after: int | None = 0

    def forget(self, count: int) -> None:
        """Forget the tasks that ended first."""
        gone, self.ended = self.ended[:count], self.ended[count:]
        for task_id in gone:
            del self.infos[task_id]
        self.forgotten += gone

    @rule(endpoint=st.sampled_from("fg"), cache_key=st.sampled_from([None, "f(1)"]))
    def add(self, endpoint: str, cache_key: str | None) -> None:
        """Submit a task, if there is capacity."""
        if len(self.infos) - len(self.ended) >= self.capacity:
            with pytest.raises(ServerBusy):
                self.desk.table.add(endpoint, cache_key)
            return
        task = self.desk.table.add(endpoint, cache_key)
        task_id = f"server-{len(self.tasks) + 1}"
        self.infos[task_id] = TaskInfo(task_id, endpoint, PENDING, self.desk.clock.time, cache_key=cache_key)
        self.tasks[task_id] = task

    @precondition(lambda self: self.infos)
    @rule(number=st.integers(0, 100), status=STATUSES, object_id=st.sampled_from([None, "x"]))
    def advance(self, number: int, status: TaskStatus, object_id: str | None) -> None:
        """Begin or end a run, or fail in the server."""
        info = list(self.infos.values())[number % len(self.infos)]
        task = self.tasks[info.task_id]
        if (info.status, status) not in ALLOWED:
            with pytest.raises(ValueError):
                self.desk.table.advance(task, status, object_id=object_id)
            return
        self.desk.table.advance(task, status, object_id=object_id)
        now = self.desk.clock.time
        dates = {"started_at": now if status is RUNNING else info.started_at, "finished_at": now if status in ENDS else None}
        self.infos[info.task_id] = replace(info, status=status, object_id=object_id, **dates)
        if status in ENDS:
            self.ended.append(info.task_id)
            self.forget(len(self.ended) - self.remembered if len(self.ended) > self.remembered else 0)

    @precondition(lambda self: self.infos)
    @rule(number=st.integers(0, 100), done=st.none() | st.integers(0, 3), asked=st.booleans())
    def update(self, number: int, done: int | None, asked: bool) -> None:
        """Report progress, or request cancellation."""
        info = list(self.infos.values())[number % len(self.infos)]
        progress = Progress(float(done)) if done is not None else None
        news = {name: value for name, value in {"progress": progress, "cancel_requested": asked}.items() if value}
        self.desk.table.update(self.tasks[info.task_id], **news)
        self.infos[info.task_id] = replace(info, **news)

    @rule(seconds=st.sampled_from([0.5, 5.0, 20.0]))
    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.desk.clock.time += seconds

    @rule()
    def expire(self) -> None:
        """Run the sweeper."""
        ends = [(self.infos[task_id].finished_at or 0.0) + self.result_ttl - self.desk.clock.time for task_id in self.ended]
        assert self.desk.table.expire() == min((left for left in ends if left > 0), default=None)
        self.forget(sum(left <= 0 for left in ends))

    @rule(limit=st.integers(1, 3))
    def read_on(self, limit: int) -> None:
        """List the next page, or the first one again."""
        infos, after = self.desk.table.page(None, self.after or 0, limit)
        if self.after is None:
            self.pages = []
        ids = [info.task_id for info in infos]
        left = [task_id for task_id in self.infos if int(task_id[7:]) > (self.after or 0)]
        assert ids == left[:limit]
        assert after == (int(ids[-1][7:]) if len(left) > limit else None)
        self.pages += ids
        self.after = after
        assert len(self.pages) == len(set(self.pages))

    @invariant()
    def both_agree(self) -> None:
        """Both agree on the existing tasks and their descriptions."""
        table = self.desk.table
        assert [task.info for task in table] == list(self.infos.values())
        assert len(table) == len(self.infos)
        assert table.counts() == {**dict.fromkeys(TaskStatus, 0), **Counter(info.status for info in self.infos.values())}
        assert all(table.get(task_id) is self.tasks[task_id] for task_id in self.infos)

    @invariant()
    def pages_hold_what_there_is(self) -> None:
        """Pages have all tasks in order, by status, and only a single page can be empty."""
        for status in (None, *TaskStatus):
            expected = [info.task_id for info in self.infos.values() if status in (None, info.status)]
            pages = self.desk.pages(2, status)
            assert [task_id for page in pages for task_id in page] == expected
            assert len(pages) == max((len(expected) + 1) // 2, 1)

    @invariant()
    def tasks_are_forgotten_once_and_in_order(self) -> None:
        """Their ids are distinguished from ids that never existed."""
        assert [task.info.task_id for task in self.desk.forgotten] == self.forgotten
        assert len(self.ended) <= self.remembered
        assert {self.desk.reason(task_id) for task_id in self.forgotten} <= {"expired"}
        assert self.desk.reason(f"server-{len(self.tasks) + 1}") == "unknown"


TestTableModel = TableModel.TestCase
TestTableModel.settings = settings(stateful_step_count=40)
