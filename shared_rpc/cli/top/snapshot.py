"""What a server tells at one moment, and what it did between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Rates", "Snapshot", "rates"]

Facts = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """All that is shown of a server.

    :param at: seconds of a clock that only goes forward; rates are measured by it.
    :param wall: Unix seconds; ages are.
    :param server: what ``get_server_info`` tells, and so on.
    :param endpoints: counters since the server's start, by endpoint.
    :param commands: what processes run, by their ids; those of which that is known.
    """

    at: float
    wall: float
    server: Facts
    objects: Sequence[Facts] = ()
    devices: Sequence[Facts] = ()
    runs: Sequence[Facts] = ()
    sessions: Sequence[Facts] = ()
    endpoints: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    commands: Mapping[int, str] = field(default_factory=dict)


class Rates(NamedTuple):
    """A second's worth of an endpoint, between two snapshots."""

    calls: float
    hits: float
    joined: float
    builds: float
    errors: float

    @property
    def hit_share(self) -> float | None:
        """Of the calls the part that the cache answered, from 0 to 1; None where there were no calls."""
        return min(self.hits / self.calls, 1.0) if self.calls > 0 else None


def rates(earlier: Snapshot | None, later: Snapshot) -> dict[str, Rates]:
    """By endpoint; empty where nothing can be said: there is one snapshot, or the server was another one."""
    if earlier is None or later.at <= earlier.at or not _same(earlier.server, later.server):
        return {}
    seconds = later.at - earlier.at
    return {
        name: Rates(*(_grown(earlier.endpoints.get(name, {}), counters, what) / seconds for what in Rates._fields))
        for name, counters in later.endpoints.items()
    }


def _same(one: Facts, other: Facts) -> bool:
    # A server under a service manager keeps its id when it is started again, and counts from nothing.
    return all(one[name] == other[name] for name in ("server_id", "pid", "started_at"))


def _grown(earlier: Mapping[str, int], later: Mapping[str, int], name: str) -> int:
    return max(later.get(name, 0) - earlier.get(name, 0), 0)
