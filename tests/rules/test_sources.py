"""The source of records, and the misses without an answer: the rule, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from shared_rpc.client.steps import Reply, Tell, Within
from shared_rpc.errors import ClusterError
from shared_rpc.execution.run import Run
from shared_rpc.operations.sources import Source
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.sources import AttachSource, DetachSource, SourceAttached
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.state.runs import RunTable
from shared_rpc.server.state.sources import SourceTable
from tests.kit.clock import Clock

GRACE = 15.0


@pytest.fixture
def clock() -> Clock:
    """A clock that advances only when the test sets it."""
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SourceTable[str]:
    """A table without a source, which expects none."""
    return SourceTable(clock, GRACE)


def a_run(key: str = "f()") -> Run[str]:
    """Return a run with a waiting caller."""
    return Run(EndpointSpec("f", []), key, ((), {}), {"waiter": None})


def test_misses_are_in_order_of_arrival(table: SourceTable[str]) -> None:
    """The source gets the ones above its position, repeatedly if it asks again."""
    table.attach("s")
    numbers = [run.miss for run in (a_run(), a_run(), a_run()) if table.ask(run)]
    assert numbers == [1, 2, 3]
    assert [miss.miss for miss in table.offer(0)] == [miss.miss for miss in table.offer(0)] == numbers
    assert [miss.miss for miss in table.offer(2)] == [3]


def test_misses_are_answered_once(table: SourceTable[str]) -> None:
    """Unknown ones cannot be answered either."""
    source, run = table.attach("s"), a_run()
    table.ask(run)
    assert table.answer("s", source.number, 1) is run and not run.miss
    for number in (1, 2):
        with pytest.raises(ClusterError) as caught:
            table.answer("s", source.number, number)
        assert caught.value.reason == "answered"


@pytest.mark.parametrize("other", ["s", "t"])
def test_the_latest_attachment_is_the_source(table: SourceTable[str], other: str) -> None:
    """Also of the same session; it gets all open misses, and the earlier one can answer none."""
    first, run = table.attach("s"), a_run()
    table.ask(run)
    table.offer(0)
    second = table.attach(other)
    assert not run.offered
    with pytest.raises(ClusterError) as caught:
        table.answer("s", first.number, 1)
    assert caught.value.reason == "replaced"
    assert table.offer(0) == [run]
    assert table.answer(other, second.number, 1) is run


def test_other_sessions_cannot_answer_for_the_source(table: SourceTable[str]) -> None:
    """The numbers are no secret."""
    number = table.attach("s").number
    with pytest.raises(ClusterError):
        table.find("t", number)
    table.lose()
    with pytest.raises(ClusterError) as caught:
        table.find("s", number)
    assert caught.value.reason == "detached"


def test_misses_of_a_lost_source_wait_for_the_grace_period(table: SourceTable[str], clock: Clock) -> None:
    """As do those that arrive in the meantime; later ones are built here."""
    table.attach("s")
    table.ask(a_run())
    assert table.lose() == [] and table.overdue() == ([], GRACE)
    clock.time += GRACE / 2
    assert table.ask(a_run())
    assert table.overdue() == ([], GRACE / 2)
    clock.time += GRACE / 2
    late, left = table.overdue()
    assert (len(late), left, len(table)) == (2, None, 0)
    assert [run.miss for run in late] == [0, 0]
    assert not table.ask(a_run())


def test_a_source_that_attaches_in_time_gets_the_misses(table: SourceTable[str], clock: Clock) -> None:
    """They are no longer overdue."""
    table.attach("s")
    run = a_run()
    table.ask(run)
    table.lose()
    clock.time += GRACE / 2
    table.attach("t")
    clock.time += 10 * GRACE
    assert table.overdue() == ([], None)
    assert table.offer(0) == [run]


def test_an_expected_source_is_waited_for_from_the_start(clock: Clock) -> None:
    """During the grace period."""
    table: SourceTable[str] = SourceTable(clock, GRACE, expected=True)
    assert table.ask(a_run())
    clock.time += GRACE
    assert len(table.overdue()[0]) == 1 and not table.ask(a_run())


def test_misses_without_waiters_end_with_their_source(table: SourceTable[str]) -> None:
    """Others are kept."""
    table.attach("s")
    left, kept = a_run(), a_run()
    for run in (left, kept):
        table.ask(run)
    table.offer(0)
    left.waiters.clear()
    assert table.lose() == [left]
    assert len(table) == 1 and kept.miss and not left.miss


@pytest.mark.parametrize("offered", [False, True])
def test_given_misses_continue_without_waiters(table: SourceTable[str], offered: bool) -> None:
    """Like a begun endpoint."""
    runs: RunTable[str] = RunTable()
    run = a_run()
    runs.open(run)
    table.attach("s")
    table.ask(run)
    if offered:
        table.offer(0)
    assert runs.leave(run, "waiter") is not offered


def test_a_source_that_is_closed_while_its_first_step_attaches_it_is_detached() -> None:
    """The closing thread does not have the number yet, so the step detaches the source and ends the iteration."""
    source = Source(None)
    step: Any = source._next()
    assert [type(next(step)), type(step.send(None).message)] == [Within, AttachSource]
    assert list(source._detach()) == []
    assert step.send(Reply(SourceAttached(7, "server"), Frame(0, 1, b""))) == Tell(DetachSource(7))
    with pytest.raises(StopIteration) as ended:
        step.send(None)
    assert ended.value.value is None
