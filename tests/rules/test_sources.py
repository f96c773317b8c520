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
    """A clock that stands until a test sets it."""
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SourceTable[str]:
    """One without a source, which expects none."""
    return SourceTable(clock, GRACE)


def a_run(key: str = "f()") -> Run[str]:
    """One that somebody waits for."""
    return Run(EndpointSpec("f", []), key, ((), {}), {"waiter": None})


def test_without_a_source_nothing_is_a_miss(table: SourceTable[str]) -> None:
    """Runs are built here."""
    run = a_run()
    assert not table.ask(run) and not run.miss and len(table) == 0


def test_misses_have_the_order_in_which_they_came(table: SourceTable[str]) -> None:
    """The source is given those that it has not, again where it asks again."""
    table.attach("s")
    numbers = [run.miss for run in (a_run(), a_run(), a_run()) if table.ask(run)]
    assert numbers == [1, 2, 3]
    assert [miss.miss for miss in table.offer(0)] == [miss.miss for miss in table.offer(0)] == numbers
    assert [miss.miss for miss in table.offer(2)] == [3]


def test_an_answered_miss_has_no_second_answer(table: SourceTable[str]) -> None:
    """Nor has one that never was."""
    source, run = table.attach("s"), a_run()
    table.ask(run)
    assert table.answer("s", source.number, 1) is run and not run.miss
    for number in (1, 2):
        with pytest.raises(ClusterError) as caught:
            table.answer("s", source.number, number)
        assert caught.value.reason == "answered"


@pytest.mark.parametrize("other", ["s", "t"])
def test_the_latest_attachment_is_the_source(table: SourceTable[str], other: str) -> None:
    """Also of the same session; it is given all misses without an answer, and the earlier one answers none."""
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
    """A number is no secret."""
    number = table.attach("s").number
    with pytest.raises(ClusterError):
        table.find("t", number)
    table.lose()
    with pytest.raises(ClusterError) as caught:
        table.find("s", number)
    assert caught.value.reason == "detached"


def test_misses_of_a_lost_source_wait_for_the_grace(table: SourceTable[str], clock: Clock) -> None:
    """And so do those that come meanwhile; what comes later is built here."""
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


def test_a_source_that_comes_in_time_gets_the_misses(table: SourceTable[str], clock: Clock) -> None:
    """They do not get late any more."""
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
    """For the grace, and no longer."""
    table: SourceTable[str] = SourceTable(clock, GRACE, expected=True)
    assert table.ask(a_run())
    clock.time += GRACE
    assert len(table.overdue()[0]) == 1 and not table.ask(a_run())


def test_a_lost_source_takes_with_it_what_nobody_waits_for(table: SourceTable[str]) -> None:
    """What others wait for is kept."""
    table.attach("s")
    left, kept = a_run(), a_run()
    for run in (left, kept):
        table.ask(run)
    table.offer(0)
    left.waiters.clear()
    assert table.lose() == [left]
    assert len(table) == 1 and kept.miss and not left.miss


@pytest.mark.parametrize("offered", [False, True])
def test_a_miss_goes_on_without_waiters_once_it_was_given(table: SourceTable[str], offered: bool) -> None:
    """As an endpoint does that has begun."""
    runs: RunTable[str] = RunTable()
    run = a_run()
    runs.open(run)
    table.attach("s")
    table.ask(run)
    if offered:
        table.offer(0)
    assert runs.leave(run, "waiter") is not offered


def test_a_source_that_is_closed_while_its_first_step_attaches_it_is_detached() -> None:
    """The closing thread does not know the number yet, so the step detaches the source and ends the iteration."""
    source = Source(None)
    step: Any = source._next()
    assert [type(next(step)), type(step.send(None).message)] == [Within, AttachSource]
    assert list(source._detach()) == []
    assert step.send(Reply(SourceAttached(7, "server"), Frame(0, 1, b""))) == Tell(DetachSource(7))
    with pytest.raises(StopIteration) as ended:
        step.send(None)
    assert ended.value.value is None
