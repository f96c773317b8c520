"""Runs of endpoints, and who waits for them.

A run is *queued*, then *running*, then closed. A cached call joins the run of its key where there is one
(singleflight). A refresh joins a refresh with the same arguments only: a key may leave arguments out, and an ordinary run
is none. Rules:

- Whatever ends a run releases every waiter; there is no other way out of the table.
- A queued run that nobody waits for any more is dropped. A running one goes on: its result is cached.
- What began later is newer: a run that ends after one which began after it does not take its place in the cache.
- Invalidation detaches a run from its key: its waiters get its result, the cache does not, and the next
  identical call starts a run of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

__all__ = ["CallTable", "Flight"]

W = TypeVar("W")


@dataclass(eq=False, slots=True)
class Flight(Generic[W]):
    """One run. ``key`` is None where its result is not to be cached, or no longer, and then ``former_key`` is what it was;
    ``progress`` is what the run said last, ``begun_at`` when its work began, on the caller's clock.
    """

    endpoint: str
    key: str | None
    running: bool = False
    begun_at: float = 0.0
    progress: Any = None
    waiters: list[W] = field(default_factory=list)
    former_key: str | None = None
    #: When it was opened, in Unix seconds.
    created_at: float = 0.0
    #: Its place in the order in which runs were opened, from 1 on.
    number: int = 0
    #: Of a refresh: what tells its arguments from others', None where nothing does.
    refreshes: str | None = None


class CallTable(Generic[W]):
    """All runs that have not ended; ``W`` is what stands for a waiter."""

    def __init__(self) -> None:
        self._flights: set[Flight[W]] = set()
        self._by_key: dict[str, Flight[W]] = {}
        self._refreshes: dict[str, Flight[W]] = {}
        self._numbers = itertools.count(1)

    def join(self, key: str | None, waiter: W) -> Flight[W] | None:
        """Wait for the run of that key; None if there is none to join."""
        return self._join(self._by_key.get(key) if key is not None else None, waiter)

    def join_refresh(self, arguments: str | None, waiter: W) -> Flight[W] | None:
        """Wait for the refresh with these arguments; None if there is none to join."""
        return self._join(self._refreshes.get(arguments) if arguments is not None else None, waiter)

    def _join(self, flight: Flight[W] | None, waiter: W) -> Flight[W] | None:
        if flight is not None:
            flight.waiters.append(waiter)
        return flight

    def open(self, endpoint: str, key: str | None, waiter: W, refreshes: str | None = None) -> Flight[W]:
        """A new, queued run. Later calls of the key join it, unless an earlier run of that key still goes on.

        :param refreshes: see :attr:`Flight.refreshes`.
        """
        flight: Flight[W] = Flight(endpoint, key, waiters=[waiter], number=next(self._numbers), refreshes=refreshes)
        self._flights.add(flight)
        if refreshes is not None:
            self._refreshes.setdefault(refreshes, flight)
        if key is not None:
            self._by_key.setdefault(key, flight)
        return flight

    def begin(self, flight: Flight[W], now: float = 0.0) -> None:
        """The run's work starts."""
        flight.running, flight.begun_at = True, now

    def leave(self, flight: Flight[W], waiter: W) -> bool:
        """The waiter gives up. True if the run has no waiter left and has not begun: drop it."""
        if waiter in flight.waiters:
            flight.waiters.remove(waiter)
        return flight in self._flights and not flight.waiters and not flight.running

    def close(self, flight: Flight[W]) -> list[W]:
        """The run ended, in whatever way: those who waited."""
        self._flights.discard(flight)
        self._unlist(flight)
        waiters, flight.waiters = flight.waiters, []
        return waiters

    def part(self, flight: Flight[W]) -> None:
        """Keep one run's result out of the cache, and later calls from joining it."""
        self._unlist(flight)
        flight.former_key, flight.key = flight.key or flight.former_key, None

    def detach(self, *, key: str | None = None, endpoint: str | None = None) -> int:
        """Keep the results of matching runs out of the cache; how many runs that were."""
        matching = [f for f in self._flights if f.key is not None and (f.key == key or f.endpoint == endpoint)]
        for flight in matching:
            self.part(flight)
        return len(matching)

    def _unlist(self, flight: Flight[W]) -> None:
        if flight.key is not None and self._by_key.get(flight.key) is flight:
            del self._by_key[flight.key]
        if flight.refreshes is not None and self._refreshes.get(flight.refreshes) is flight:
            del self._refreshes[flight.refreshes]

    def __contains__(self, flight: object) -> bool:
        return flight in self._flights

    def __iter__(self) -> Iterator[Flight[W]]:
        return iter(tuple(self._flights))

    def __len__(self) -> int:
        return len(self._flights)
