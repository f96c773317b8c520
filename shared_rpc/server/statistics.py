"""Counts of what endpoints have done since the server began, by endpoint: the only ones that are kept.

They are always kept, for one dict and one addition a step. Totals are their sums, metrics read them, and what costs more, as
histograms do, is counted from events where metrics are asked for, see :mod:`shared_rpc.observability.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["EndpointCounts", "Statistics"]


@dataclass(slots=True)
class EndpointCounts:
    """Counts of one endpoint. All of them only grow.

    :param calls: calls and submits that named it and had arguments that fit.
    :param hits: of these, those that were answered from the cache.
    :param misses: those that the cache could have answered, and that began a run.
    :param joined: those that joined a run that went on already (singleflight).
    :param builds: runs of the endpoint that began; one that is not cached has as many as calls.
    :param build_seconds: what the runs that ended took together, from their beginning to their outcome.
    :param errors: waiters that were told a failure.
    """

    calls: int = 0
    hits: int = 0
    misses: int = 0
    joined: int = 0
    builds: int = 0
    build_seconds: float = 0.0
    errors: int = 0

    def facts(self) -> dict[str, int | float]:
        """Return the counts by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class Statistics:
    """Counts of every endpoint that was ever registered with a server.

    :ivar refused: calls that no endpoint got: of a name that is not registered, or with arguments that do not fit.
    """

    def __init__(self) -> None:
        self._counts: dict[str, EndpointCounts] = {}
        self.refused = 0

    def of(self, endpoint: str) -> EndpointCounts:
        """Return an endpoint's counts, to be read or added to. Its name must be a registered one."""
        counts = self._counts.get(endpoint)
        if counts is None:
            counts = self._counts[endpoint] = EndpointCounts()
        return counts

    def facts(self) -> dict[str, dict[str, int | float]]:
        """Return the counts by the endpoint's name."""
        return {name: counts.facts() for name, counts in self._counts.items()}

    def totals(self) -> dict[str, int]:
        """Return the counts of the whole server, as ``get_server_info`` names them."""
        counts = self._counts.values()
        return {
            "calls": sum(count.calls for count in counts) + self.refused,
            "cache_hits": sum(count.hits for count in counts),
            "joined": sum(count.joined for count in counts),
            "builds": sum(count.builds for count in counts),
            "failures": sum(count.errors for count in counts) + self.refused,
        }

    def __iter__(self) -> Iterator[tuple[str, EndpointCounts]]:
        return iter(self._counts.items())
