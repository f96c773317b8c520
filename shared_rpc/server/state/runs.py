"""Runs of endpoints, and their waiters.

A run is *queued*, then *running*, then closed. A cached call joins an existing run of its key (singleflight). A refresh joins
only a refresh with the same arguments: a key may leave arguments out, and an ordinary run may have begun earlier. Rules:

- Every end of a run releases every waiter; there is no other way out of the table.
- A queued run without waiters is dropped. A running one continues, since its result is cached. The same applies to a run
  whose miss was given to a source of records, see :mod:`shared_rpc.server.sources`.
- Later runs are newer: a run that ends after a run that began later does not replace the latter's result in the cache.
- Invalidation detaches a run from its key: its waiters get its result, but the cache does not, and the next identical call
  starts its own run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

from shared_rpc.execution.run import Run

W = TypeVar("W")


class RunTable(Generic[W]):
    """All active runs; ``W`` is the type of waiters."""

    def __init__(self) -> None:
        #: Active runs.
        self.runs: set[Run[W]] = set()
        #: The run that calls of a key join; and, with True, refreshes with the same arguments.
        self._joinable: dict[tuple[bool, str | None], Run[W]] = {}
        self._numbers = itertools.count(1)

    def join(self, key: str | None, waiter: W, *, refresh: bool = False) -> Run[W] | None:
        """Wait for the run of a key; return None if there is none to join.

        :param refresh: True for the refresh with these arguments, which are given in place of the key.
        """
        run = self._joinable.get((refresh, key))
        if run is not None:
            run.waiters[waiter] = None
        return run

    def open(self, run: Run[W]) -> None:
        """Add a new, queued run. Later calls of its key join it, unless an earlier run of that key is still active."""
        run.number = next(self._numbers)
        self.runs.add(run)
        if run.refreshes is not None:
            self._joinable.setdefault((True, run.refreshes), run)
        if run.key is not None and run.cached:
            self._joinable.setdefault((False, run.key), run)

    def number(self) -> int:
        """Return the next number, for a run or for a record of another process."""
        return next(self._numbers)

    def leave(self, run: Run[W], waiter: W) -> bool:
        """Remove a waiter. Return True if the run has no waiter left and has not begun, so that it must be dropped."""
        run.waiters.pop(waiter, None)
        return run in self.runs and not run.waiters and not run.running and not run.offered

    def close(self, run: Run[W]) -> list[W]:
        """Close an ended run and return its waiters."""
        self.runs.discard(run)
        if run.cached or run.refreshes is not None:
            self._unlist(run)
        waiters, run.waiters = list(run.waiters), {}
        return waiters

    def part(self, run: Run[W]) -> None:
        """Exclude a run from the cache and from being joined by later calls."""
        self._unlist(run)
        run.cached = False

    def detach(self, *, key: str | None = None, endpoint: str | None = None) -> None:
        """Keep the results of matching runs out of the cache, also if they are promoted."""
        for run in self.runs:
            if run.spec.name == endpoint or (key is not None and run.key == key):
                if run.prepares:
                    run.invalidated = True
                elif run.cached:
                    self.part(run)

    def _unlist(self, run: Run[W]) -> None:
        for name in ((False, run.key), (True, run.refreshes)):
            if self._joinable.get(name) is run:
                del self._joinable[name]

    def __iter__(self) -> Iterator[Run[W]]:
        return iter(tuple(self.runs))

    def __len__(self) -> int:
        return len(self.runs)
