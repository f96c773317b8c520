"""What endpoints have done since the server began, counted by endpoint.

It is always counted: one dict and one addition a step. What takes more, as histograms do, is an event that somebody must ask
for, see :mod:`shared_rpc.instrumentation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["EndpointCounts", "Statistics"]


@dataclass(slots=True)
class EndpointCounts:
    """One endpoint's. All of them only grow.

    :param calls: calls and submits that named it and had arguments that fit.
    :param hits: of these, those that were answered from the cache.
    :param joined: those that joined a run that went on already (singleflight).
    :param builds: runs of the endpoint that began; one that is not cached has as many as calls.
    :param build_seconds: what the runs that ended took together, from their beginning to their outcome.
    :param errors: waiters that were told a failure.
    """

    calls: int = 0
    hits: int = 0
    joined: int = 0
    builds: int = 0
    build_seconds: float = 0.0
    errors: int = 0

    def facts(self) -> dict[str, int | float]:
        """By name."""
        return dataclasses.asdict(self)


class Statistics:
    """The counts of every endpoint that was ever registered with a server; names that nobody registered are not counted."""

    def __init__(self) -> None:
        self._counts: dict[str, EndpointCounts] = {}

    def of(self, endpoint: str) -> EndpointCounts:
        """An endpoint's, to be read or added to. Its name must be a registered one."""
        counts = self._counts.get(endpoint)
        if counts is None:
            counts = self._counts[endpoint] = EndpointCounts()
        return counts

    def facts(self) -> dict[str, dict[str, int | float]]:
        """By the endpoint's name."""
        return {name: counts.facts() for name, counts in self._counts.items()}

    def __iter__(self) -> Iterator[tuple[str, EndpointCounts]]:
        return iter(self._counts.items())
