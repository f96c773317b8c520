"""Progress that an endpoint reports, directly and by progress bars: the run that it belongs to, and its timing."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tqdm.auto import tqdm
from tqdm.contrib.concurrent import thread_map

from shared_rpc import cancelled, progress, raise_if_cancelled
from shared_rpc.context import CURRENT_RUN, RunContext
from shared_rpc.execution.in_process import Reporter
from shared_rpc.extras.progress_bar import ProgressBar
from shared_rpc.protocol.tasks import Progress


@pytest.fixture
def reports() -> Iterator[list[Progress]]:
    """The reports of the run that contains the test."""
    reports: list[Progress] = []
    token = CURRENT_RUN.set(RunContext(frozenset(), reports.append))
    yield reports
    CURRENT_RUN.reset(token)


def silent(*args: Any, **kwargs: Any) -> ProgressBar:
    """Return a bar that draws nothing."""
    return ProgressBar(*args, file=io.StringIO(), **kwargs)


def counted(total: float | None, message: str, *done: float) -> list[Progress]:
    """Return the reports of one bar."""
    return [Progress(float(number), total, message) for number in done]


def test_progress_outside_of_an_endpoint_is_ignored() -> None:
    """And a bar is an ordinary tqdm bar."""
    progress(1, 2, "half")
    assert cancelled() is False
    raise_if_cancelled()
    with silent(total=3) as bar:
        bar.update(2)
        assert bar.n == 2


def test_progress_accepts_any_number(reports: list[Progress]) -> None:
    """Other values are the endpoint's error."""
    progress(True, 2)
    progress(float("inf"), -1, message=3)  # type: ignore[arg-type]
    assert reports == [Progress(1.0, 2.0), Progress(float("inf"), -1.0, "3")]
    with pytest.raises(ValueError):
        progress("many")  # type: ignore[arg-type]


def test_messages_are_sendable(reports: list[Progress]) -> None:
    """A file's name may contain bytes that are not text, and a text may be long."""
    progress(1, 2, os.fsdecode(b"weights-\xff.bin"))
    progress(1, 2, "x" * (17 << 20))
    assert [len(report.message.encode()) for report in reports] == [len(r"weights-\udcff.bin"), 1000]


def updated() -> None:
    """Update a bar directly."""
    with silent(total=10, desc="weights: ") as bar:
        for step in (1, 2, 7):
            bar.update(step)


def iterated() -> None:
    """Iterate over two bars: one that is drawn with every step, and one only at its end."""
    assert list(silent(range(3), mininterval=0, miniters=1)) == [0, 1, 2]
    for _ in silent(range(1000), mininterval=1000, desc="Bar"):
        continue


def not_reported() -> None:
    """Iterate over a disabled bar, and one of tqdm's own: subclassing that changes nothing for others."""
    assert list(silent(range(2), disable=True)) == [0, 1]
    assert list(tqdm(range(2), file=io.StringIO(), mininterval=0)) == [0, 1]


def in_a_bar() -> None:
    """Update a bar within the iteration of another one."""
    with silent(total=2, desc="files") as outer:
        with silent(total=1, desc="parts") as inner:
            inner.update()
        outer.update()


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (updated, counted(10.0, "weights", 0, 1, 3, 10, 10)),
        (iterated, counted(3.0, "", 0, 1, 2, 3, 3) + counted(1000.0, "Bar", 0, 1000)),
        (not_reported, []),
        (in_a_bar, counted(2.0, "files", 0) + counted(1.0, "parts", 0, 1, 1) + counted(2.0, "files", 1, 1)),
    ],
)
def test_a_bar_reports_progress(reports: list[Progress], work: Callable[[], None], expected: list[Progress]) -> None:
    """As often as it would be drawn, and at both ends: its number, total and description."""
    work()
    assert reports == expected


def test_a_bar_can_be_updated_by_other_threads(reports: list[Progress]) -> None:
    """For its own run, for example when a library updates it in a pool."""
    assert thread_map(abs, range(4), tqdm_class=ProgressBar, max_workers=2) == [0, 1, 2, 3]
    assert [reports[0], reports[-1]] == counted(4.0, "", 0, 4)


# The number and the timing of reports.


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
