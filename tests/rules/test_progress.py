"""Progress that an endpoint reports: directly, and by progress bars, each of which belongs to the run that made it."""

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
