"""Timing in turns, and what is kept of the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["Sample", "interleaved", "timed"]

#: Calls before those that count, in each turn: the caches belong to whoever had the turn before.
_WARM_UP = 10


class Sample:
    """Times in seconds, grouped by the turn in which they were taken."""

    def __init__(self, rounds: Iterable[Iterable[float]]) -> None:
        self.rounds = [list(times) for times in rounds]
        self._sorted = sorted(seconds for times in self.rounds for seconds in times)
        if not self._sorted:
            raise ValueError("a sample without a single time")

    def quantile(self, share: float) -> float:
        """Return the time that ``share`` of all times (0 to 1) do not exceed."""
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]

    @property
    def p50(self) -> float:
        """The median of all times."""
        return statistics.median(self._sorted)

    @property
    def p99(self) -> float:
        """The time that 99 % do not exceed."""
        return self.quantile(0.99)

    def as_json(self) -> dict[str, Any]:
        """Return counts and percentiles in seconds, with the median of every turn, which shows how steady the machine was."""
        return {
            "n": len(self._sorted),
            "min": self._sorted[0],
            "p50": self.p50,
            "p90": self.quantile(0.9),
            "p99": self.p99,
            "max": self._sorted[-1],
            "p50_of_rounds": [statistics.median(times) for times in self.rounds if times],
        }


def timed(action: Callable[[], object]) -> float:
    """Measure the seconds of an action; its result is dropped within them."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def interleaved(
    actions: Mapping[str, Callable[[], object]], *, rounds: int, calls: int, warm_up: int = _WARM_UP
) -> dict[str, Sample]:
    """Time every action ``calls`` times in each of ``rounds`` turns: A B C A B C."""
    times: dict[str, list[list[float]]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            for _ in range(min(warm_up, calls)):
                action()
            times[name].append([timed(action) for _ in range(calls)])
    return {name: Sample(taken) for name, taken in times.items()}
