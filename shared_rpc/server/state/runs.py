"""Runs of endpoints, and their waiters.

A run is *queued*, then *running*, then closed. A cached call joins the run of its key where there is one
(singleflight). A refresh joins a refresh with the same arguments only: a key may leave arguments out, and an ordinary run
is none. Rules:

- Whatever ends a run releases every waiter; there is no other way out of the table.
- A queued run without waiters is dropped. A running one continues: its result is cached. So does one whose miss a source of
  records was given, see :mod:`shared_rpc.server.state.sources`.
- What began later is newer: a run that ends after one which began after it does not take its place in the cache.
- Invalidation detaches a run from its key: its waiters get its result, the cache does not, and the next
  identical call starts a run of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

from shared_rpc.execution.run import Run

W = TypeVar("W")


class RunTable(Generic[W]):
    """All runs that have not ended; ``W`` is the type of waiters."""

    def __init__(self) -> None:
        #: Runs that have not ended.
        self.runs: set[Run[W]] = set()
        self._by_key: dict[str, Run[W]] = {}
        self._refreshes: dict[str, Run[W]] = {}
        self._numbers = itertools.count(1)

    def join(self, key: str | None, waiter: W) -> Run[W] | None:
        """Wait for the run of that key; None if there is none to join."""
        return self._join(self._by_key.get(key) if key is not None else None, waiter)

    def join_refresh(self, arguments: str | None, waiter: W) -> Run[W] | None:
        """Wait for the refresh with these arguments; None if there is none to join."""
        return self._join(self._refreshes.get(arguments) if arguments is not None else None, waiter)

    def _join(self, run: Run[W] | None, waiter: W) -> Run[W] | None:
        if run is not None:
            run.waiters[waiter] = None
        return run

    def open(self, run: Run[W]) -> None:
        """Take in a new, queued run. Later calls of its key join it, unless an earlier run of that key has not ended."""
        run.number = next(self._numbers)
        self.runs.add(run)
        if run.refreshes is not None:
            self._refreshes.setdefault(run.refreshes, run)
        if run.key is not None:
            self._by_key.setdefault(run.key, run)

    def number(self) -> int:
        """Return the next number, for a run or for a record of another process."""
        return next(self._numbers)

    def leave(self, run: Run[W], waiter: W) -> bool:
        """Forget a waiter that gives up. True if the run has no waiter left and has not begun: drop it."""
        run.waiters.pop(waiter, None)
        return run in self.runs and not run.waiters and not run.running and not run.offered

    def close(self, run: Run[W]) -> list[W]:
        """Close a run that ended, in whatever way, and return its waiters."""
        self.runs.discard(run)
        if run.key is not None or run.refreshes is not None:
            self._unlist(run)
        waiters, run.waiters = list(run.waiters), {}
        return waiters

    def part(self, run: Run[W]) -> None:
        """Keep one run's result out of the cache, and later calls from joining it."""
        self._unlist(run)
        run.former_key, run.key = run.key or run.former_key, None

    def detach(self, *, key: str | None = None, endpoint: str | None = None) -> int:
        """Keep the results of matching runs out of the cache, also if they are promoted; how many runs that were."""
        for run in self.runs:
            if run.prepares and (run.former_key == key or run.spec.name == endpoint):
                run.invalidated = True
        matching = [run for run in self.runs if run.key is not None and (run.key == key or run.spec.name == endpoint)]
        for run in matching:
            self.part(run)
        return len(matching)

    def _unlist(self, run: Run[W]) -> None:
        if run.key is not None and self._by_key.get(run.key) is run:
            del self._by_key[run.key]
        if run.refreshes is not None and self._refreshes.get(run.refreshes) is run:
            del self._refreshes[run.refreshes]

    def __iter__(self) -> Iterator[Run[W]]:
        return iter(tuple(self.runs))

    def __len__(self) -> int:
        return len(self.runs)
