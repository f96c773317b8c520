"""Reports of an endpoint's progress: their number and their timing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared_rpc.execution.in_process import Reporter
from shared_rpc.protocol.tasks import Progress


class Loop:
    """The part of an event loop that a reporter uses, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        """Return the seconds."""
        return self.now

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Schedule a call in the next turn."""
        self.soon.append(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Loop:
        """Schedule a call at a time."""
        self.later.append((self.now + seconds, callback))
        return self

    def cancel(self) -> None:
        """Cancel the only timer."""
        self.later.clear()

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, and make all due calls."""
        self.now += seconds
        due = self.soon + [callback for when, callback in self.later if when <= self.now]
        self.soon, self.later = [], [(when, callback) for when, callback in self.later if when > self.now]
        for callback in due:
            callback()


@pytest.fixture
def loop() -> Loop:
    """A loop without a thread."""
    return Loop()


@pytest.fixture
def delivered() -> list[float]:
    """The delivered reports."""
    return []


@pytest.fixture
def reporter(loop: Loop, delivered: list[float]) -> Reporter:
    """A reporter on the loop."""
    return Reporter(loop, lambda report: delivered.append(report.done))


def test_the_latest_report_of_each_period_is_delivered(reporter: Reporter, loop: Loop, delivered: list[float]) -> None:
    """The first one at once; the loop is woken once for all that precede its turn, and not at all without a new report."""
    for number in range(1000):
        reporter.put(Progress(number))
    assert len(loop.soon) == 1 and delivered == []
    loop.turn()
    assert delivered == [999]
    for number in range(1000, 1050):
        reporter.put(Progress(number))
    loop.turn(0.049)
    assert delivered == [999] and loop.soon == []
    loop.turn(0.002)
    assert delivered == [999, 1049]
    loop.turn(0.051)
    assert loop.later == []
    reporter.put(Progress(2000))
    loop.turn()
    assert delivered == [999, 1049, 2000]


@pytest.mark.parametrize("reported_before", [False, True])
def test_the_end_delivers_the_deferred_report(
    reporter: Reporter, loop: Loop, delivered: list[float], reported_before: bool
) -> None:
    """Only the last one, whether or not the loop had its turn before, and then nothing more."""
    if reported_before:
        reporter.put(Progress(0))
        loop.turn()
        delivered.clear()
    for number in range(50):
        reporter.put(Progress(number))
    reporter.close()
    assert delivered == [49] and loop.later == []
    reporter.put(Progress(1000))
    loop.turn(1.0)
    reporter.close()
    assert delivered == [49] and loop.soon == []
