"""The source of records of a server, and its misses.

A *miss* is a run that waits for the source's answer. Rules:

- There is one source at a time. A new one replaces it, and gets all open misses.
- A miss given to the source continues without waiters, like a running endpoint; one that was not given is dropped.
- Without a source, misses wait for one until ``grace`` seconds after the last one was lost, or after the server's start if
  one is expected. After that, they and later ones are built here.
- A server that never had a source, and expects none, has no misses.
- An object that becomes current in another way answers the misses of its call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from shared_rpc.errors import ClusterError
from shared_rpc.execution.run import Run
from shared_rpc.protocol.infos import ClusterStatus
from shared_rpc.server.state import Clock

W = TypeVar("W")


class Attachment(msgspec.Struct, eq=False):
    """One attachment of a session as the source of records; ``since`` is in Unix seconds, and ``detached`` is True if it was
    closed or its session has ended.
    """

    number: int
    session: str
    since: float
    status: ClusterStatus = msgspec.field(default_factory=ClusterStatus)
    detached: bool = False


class SourceTable(Generic[W]):
    """The current source, if any, and the open misses; ``W`` is the type of the runs' waiters.

    :param grace: seconds that misses wait for a source.
    :param changed: called when there is a new miss, or the source changes.
    :param expected: True if a source will be attached soon after the server's start.
    """

    def __init__(
        self, clock: Clock, grace: float, changed: Callable[[], None] = lambda: None, *, expected: bool = False
    ) -> None:
        self.grace = grace
        self.source: Attachment | None = None
        self._clock = clock
        self._changed = changed
        #: By number, see :attr:`Run.miss`.
        self._misses: dict[int, Run[W]] = {}
        self._numbers = itertools.count(1)
        self._attachments = itertools.count(1)
        #: The time until which misses wait for a source, on the clock.
        self._until = clock.now() + grace if expected else float("-inf")

    def attach(self, session: str) -> Attachment:
        """Make a session the source, replacing an earlier one; it gets all misses."""
        self.source = Attachment(next(self._attachments), session, self._clock.unix(self._clock.now()))
        self._take_back()
        self._changed()
        return self.source

    def lose(self) -> list[Run[W]]:
        """Handle the loss of the source; return the misses without waiters, which are removed."""
        assert self.source is not None, "there is a source to lose"
        self.source.detached, self.source = True, None
        self._until = self._clock.now() + self.grace
        self._take_back()
        unwanted = [run for run in self._misses.values() if not run.waiters]
        for run in unwanted:
            self.remove(run)
        self._changed()
        return unwanted

    def find(self, session: str, number: int) -> Attachment:
        """Return the source with this number.

        :raises ClusterError: if it is no longer the source.
        """
        source = self.source
        if source is not None and (source.number, source.session) == (number, session):
            return source
        if source is not None:
            raise ClusterError(
                f"this session is no longer the server's source of records: session {source.session} has replaced it (source "
                f"{source.number}), and answers all misses",
                reason="replaced",
            )
        raise ClusterError(
            "this session is not the server's source of records: it was closed, or its session has ended. Attach it again",
            reason="detached",
        )

    def ask(self, run: Run[W]) -> bool:
        """Offer a run to the source, or let it wait for one; return False if it must be built here."""
        if self.source is None and self._clock.now() >= self._until:
            return False
        run.miss = next(self._numbers)
        self._misses[run.miss] = run
        self._changed()
        return True

    def offer(self, after: int) -> list[Run[W]]:
        """Return the misses with numbers above ``after``, and mark them as given to the source."""
        found = [run for run in self._misses.values() if run.miss > after]
        for run in found:
            run.offered = True
        return found

    def answer(self, session: str, source: int, number: int) -> Run[W]:
        """Remove a miss that the source answers.

        :raises ClusterError: like :meth:`open`.
        """
        run = self.open(session, source, number)
        self.remove(run)
        return run

    def open(self, session: str, source: int, number: int) -> Run[W]:
        """Return an open miss.

        :raises ClusterError: if the session is not that source, or the miss was answered.
        """
        self.find(session, source)
        run = self._misses.get(number)
        if run is None:
            raise ClusterError(
                f"miss {number} needs no answer: it was answered, or all of its callers have left", reason="answered"
            )
        return run

    def of_call(self, cache_key: str | None, fingerprint: str) -> list[Run[W]]:
        """Return the open misses of a call, including those from before an invalidation."""
        return [
            run
            for run in self._misses.values()
            if (run.key or run.former_key, run.spec.fingerprint) == (cache_key, fingerprint)
        ]

    def remove(self, run: Run[W]) -> None:
        """Remove the miss of a run."""
        self._misses.pop(run.miss, None)
        run.miss, run.offered = 0, False

    def overdue(self) -> tuple[list[Run[W]], float | None]:
        """Remove the misses that have waited long enough; return them and the seconds until the next check."""
        if self.source is not None or not self._misses:
            return [], None
        left = self._until - self._clock.now()
        if left > 0:
            return [], left
        late = list(self._misses.values())
        for run in late:
            self.remove(run)
        return late, None

    def _take_back(self) -> None:
        for run in self._misses.values():
            run.offered = False

    def __len__(self) -> int:
        return len(self._misses)
