"""The source of records of a server, and the misses that are put to it.

A *miss* is a run that waits for the source's answer. Rules:

- There is one source. Another one takes its place, and all misses without an answer are put to that.
- A miss that the source was given continues without waiters, as a running endpoint does; one that it was not given is dropped.
- Without a source, misses wait for one until ``grace`` seconds after the last one was lost, or after the server's start where
  one is expected. What is left then, and later ones, are built here.
- A server that never had a source, and expects none, has no misses.
- An object that becomes current in another way answers the misses of its call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared_rpc.errors import ClusterError
from shared_rpc.execution.run import Run
from shared_rpc.protocol.infos import ClusterStatus
from shared_rpc.server.state import Clock

W = TypeVar("W")


@dataclass(eq=False, slots=True)
class Attachment:
    """One attachment of a session as the source of records; ``since`` is in Unix seconds, and ``detached`` whether it was
    closed, or its session has ended.
    """

    number: int
    session: str
    since: float
    status: ClusterStatus = field(default_factory=ClusterStatus)
    detached: bool = False


class SourceTable(Generic[W]):
    """The source, if there is one, and the misses without an answer; ``W`` is the type of the runs' waiters.

    :param grace: seconds that misses wait for a source.
    :param changed: called when there is a new miss, or another source or none.
    :param expected: whether a source will be attached soon after the server's start.
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
        #: Until when misses wait for a source, on the clock.
        self._until = clock.now() + grace if expected else float("-inf")

    def attach(self, session: str) -> Attachment:
        """Make a session the source, in place of an earlier one; all misses are put to it."""
        self.source = Attachment(next(self._attachments), session, self._clock.unix(self._clock.now()))
        self._take_back()
        self._changed()
        return self.source

    def lose(self) -> list[Run[W]]:
        """Note that the source has disconnected; return the misses without waiters, which are removed."""
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
        """Return the source, which names itself by its number.

        :raises ClusterError: if it is none any more.
        """
        source = self.source
        if source is not None and (source.number, source.session) == (number, session):
            return source
        if source is not None:
            raise ClusterError(
                f"this session is not the server's source of records any more: another one has taken its place "
                f"(source {source.number}, session {source.session}), and answers all misses",
                reason="replaced",
            )
        raise ClusterError(
            "this session is not the server's source of records: it was closed, or its session has ended. Attach it again",
            reason="detached",
        )

    def ask(self, run: Run[W]) -> bool:
        """Put a run to the source, or let it wait for one; False if it is to be built here."""
        if self.source is None and self._clock.now() >= self._until:
            return False
        run.miss = next(self._numbers)
        self._misses[run.miss] = run
        self._changed()
        return True

    def offer(self, after: int) -> list[Run[W]]:
        """Give the source the misses with numbers above ``after``."""
        found = [run for run in self._misses.values() if run.miss > after]
        for run in found:
            run.offered = True
        return found

    def answer(self, session: str, source: int, number: int) -> Run[W]:
        """Take a miss out that its source has an answer to.

        :raises ClusterError: as :meth:`open`.
        """
        run = self.open(session, source, number)
        self.remove(run)
        return run

    def open(self, session: str, source: int, number: int) -> Run[W]:
        """Return a miss without an answer.

        :raises ClusterError: if the session is not that source, or the miss has an answer.
        """
        self.find(session, source)
        run = self._misses.get(number)
        if run is None:
            raise ClusterError(
                f"miss {number} has no need of an answer: it has one, or all that waited for it have left", reason="answered"
            )
        return run

    def of_call(self, cache_key: str | None, fingerprint: str) -> list[Run[W]]:
        """Return the misses of a call without an answer, those from before an invalidation too."""
        return [
            run
            for run in self._misses.values()
            if (run.key or run.former_key, run.spec.fingerprint) == (cache_key, fingerprint)
        ]

    def remove(self, run: Run[W]) -> None:
        """Forget the miss of a run."""
        self._misses.pop(run.miss, None)
        run.miss, run.offered = 0, False

    def overdue(self) -> tuple[list[Run[W]], float | None]:
        """Take the misses out that have waited for a source long enough; with the seconds until there may be more."""
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
