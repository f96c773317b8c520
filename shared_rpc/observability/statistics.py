"""Counts of calls since the server began, by endpoint: the only ones that are kept.

They are always kept, for one dict and one addition a step. Totals are their sums, metrics read them, and what costs more, as
histograms do, is counted from events where metrics are asked for, see :mod:`shared_rpc.observability.metrics`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from shared_rpc.protocol.infos import EndpointStatistics, ServerStatistics


def _zeros() -> EndpointStatistics:
    return EndpointStatistics(calls=0, hits=0, misses=0, joined=0, adopted=0, builds=0, build_seconds=0.0, errors=0)


class Statistics:
    """Counts of every endpoint that was ever registered with a server.

    :ivar refused: calls that no endpoint got: of a name that is not registered, or with arguments that do not fit.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[str, EndpointStatistics] = defaultdict(_zeros)
        #: Returns the counts of a registered endpoint, to be read or added to.
        self.of: Callable[[str], EndpointStatistics] = self._counts.__getitem__
        self.refused = 0

    def infos(self) -> dict[str, EndpointStatistics]:
        """Return a copy of all counts, by the endpoint's name."""
        return {name: counts.copy() for name, counts in self._counts.items()}

    def totals(self) -> ServerStatistics:
        """Return the sums over all endpoints."""
        counts = self._counts.values()
        return {
            "calls": sum(count["calls"] for count in counts) + self.refused,
            "cache_hits": sum(count["hits"] for count in counts),
            "joined": sum(count["joined"] for count in counts),
            "builds": sum(count["builds"] for count in counts),
            "failures": sum(count["errors"] for count in counts) + self.refused,
        }

    def __iter__(self) -> Iterator[tuple[str, EndpointStatistics]]:
        return iter(self._counts.items())
