"""The source of records at work: runs are put to it as misses, and its answers end them."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shared_rpc.errors import CapabilityError, ClusterError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import Run
from shared_rpc.memory.records import Record
from shared_rpc.protocol.infos import ClusterStatus, SourceInfo
from shared_rpc.protocol.sources import Miss
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.runs import Waiter, tell
from shared_rpc.server.state.clock import Clock
from shared_rpc.server.state.sources import Attachment, OpenMiss, SourceTable

if TYPE_CHECKING:
    from shared_rpc.server.joiner import Joiner

__all__ = ["Sources"]

_log = logging.getLogger("shared_rpc.server")

#: Called with misses for the source; with none once it was closed.
Answer = Callable[[list[Miss]], object]


def make_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_hex(32)


class Runner(Protocol):
    """The runs of the server, as far as a source's answers go to them."""

    def begin(self, run: Run[Waiter]) -> None:
        """Have a run built here."""

    def adopt(self, run: Run[Waiter], record: Record) -> None:
        """End a run with a record, which belongs to the runs now."""

    def fail(self, run: Run[Waiter], failure: Failure) -> None:
        """End a run with an error."""

    def drop(self, run: Run[Waiter]) -> None:
        """Drop a run that nobody waits for."""


class Sources:
    """The source of records of a server, one at a time. On its loop only.

    :param runs: returns the server's runs.
    :param joiner: starts sources, so that one is expected from the server's start on.
    :param pid_of: returns the process of a session.
    :param wake_within: has :meth:`expire` called after so many seconds at the latest.
    """

    def __init__(
        self,
        runs: Callable[[], Runner],
        clock: Clock,
        device: str,
        pid_of: Callable[[str], int],
        wake_within: Callable[[float], None],
        *,
        joiner: Joiner | None,
        grace: float,
    ) -> None:
        #: Known to processes that this server starts, see :meth:`check_token`.
        self.token = make_token()
        self._runs = runs
        self._device = device
        self._joiner = joiner
        self._pid_of = pid_of
        self._wake_within = wake_within
        self._table: SourceTable[Waiter] = SourceTable(clock, grace, expected=joiner is not None)
        #: Whether a source was attached, or is expected: otherwise there is nothing to tell.
        self._known = joiner is not None
        #: Requests for misses that wait: the last miss that each waiter has, and where the answer goes.
        self._waiting: dict[Waiter, tuple[int, Answer]] = {}
        #: The failure for the source once the server has stopped.
        self._gone: Failure | None = None

    # For runs.

    def ask(self, run: Run[Waiter]) -> bool:
        """Put a run to the source; False if it is to be built here."""
        miss = self._table.ask(run)
        if miss is None:
            return False
        if self._table.source is None:
            self._wake_within(self._table.grace)
        waiting, self._waiting = self._waiting, {}
        self._offer(waiting)
        return True

    def unasked(self, run: Run[Waiter]) -> None:
        """Forget the miss of a run that is dropped."""
        self._table.remove(run)

    # For the source.

    def check_token(self, token: str) -> None:
        """Check that a process which wants to be the source was started by this server.

        :raises CapabilityError: if it was not: its answers are unpickled by the callers.
        """
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise CapabilityError(
                f"the server (pid {os.getpid()}) takes records from the process alone that it started and gave its token "
                f"(SHARED_TENSOR_SOURCE_TOKEN): have it start your program, by --cluster-program or Provider(cluster=…)"
            )

    def attach(self, session: str) -> Attachment:
        """Make a session the source of records; an earlier one gets an error."""
        earlier = self._table.source
        source = self._table.attach(session)
        self._known = True
        if earlier is not None:
            _log.warning(
                "pid %d is the source of records now, in place of pid %d", self._pid_of(session), self._pid_of(earlier.session)
            )
            self._end_waits(self._error_of(earlier))
        return source

    def wait(self, waiter: Waiter, source: int, after: int, answer: Answer) -> None:
        """Call ``answer`` once with the misses above ``after`` that have no answer, when there are any.

        :raises ClusterError: if the session is not that source.
        """
        if self._gone is not None:
            tell(waiter, self._gone)
            return
        self._table.find(waiter.session, source)
        self._offer({waiter: (after, answer)})

    def build(self, waiter: Waiter, source: int, miss: int) -> None:
        """Have the object of a miss built here; the waiter gets it too."""
        run = self._table.answer(waiter.session, source, miss).run
        self._join(waiter, run)
        self._runs().begin(run)

    def spec_of(self, session: str, source: int, miss: int) -> EndpointSpec:
        """Return the endpoint of a miss.

        :raises ClusterError: if the session is not that source, or the miss has an answer.
        """
        return self._table.open(session, source, miss).run.spec

    def adopt(self, waiter: Waiter, source: int, miss: int, record: Record) -> None:
        """Answer an open miss with a record, which belongs to this object now; the waiter gets the object too."""
        run = self._table.answer(waiter.session, source, miss).run
        self._join(waiter, run)
        self._runs().adopt(run, record)

    def fail(self, session: str, source: int, miss: int, failure: Failure) -> None:
        """Answer a miss with an error."""
        self._runs().fail(self._table.answer(session, source, miss).run, failure)

    def report(self, session: str, source: int, status: ClusterStatus) -> None:
        """Keep what the source reports of itself."""
        self._table.find(session, source).status = status

    def detach(self, session: str, source: int) -> bool:
        """Take a source back; False if it was none any more."""
        found = self._table.source
        if found is None or (found.number, found.session) != (source, session):
            return False
        self._lose("was closed")
        return True

    # For the server.

    def leave(self, waiter: Waiter) -> None:
        """Forget a request of the source."""
        self._waiting.pop(waiter, None)

    def end_session(self, session: str) -> None:
        """Note that a session has ended, which may be the source's."""
        if self._table.source is not None and self._table.source.session == session:
            self._lose("has ended")

    def expire(self) -> float | None:
        """Have misses built here that no source came for; return the seconds until there may be more, None for never."""
        late, left = self._table.overdue()
        if late:
            _log.warning("no source of records for %g s: %s are built here", self._table.grace, ", ".join(_names(late)))
        for miss in late:
            self._runs().begin(miss.run)
        return left

    def stop(self, failure: Failure) -> None:
        """Notify the source that the server has stopped."""
        self._gone = failure
        self._end_waits(failure)

    @property
    def pids(self) -> list[int]:
        """The processes that belong to the source: they are no users of the server."""
        source, joiner = self._table.source, self._joiner.info()["pid"] if self._joiner is not None else None
        return [*([self._pid_of(source.session)] if source is not None else []), *([joiner] if joiner is not None else [])]

    def info(self) -> SourceInfo | None:
        """Describe the source; None in a server that has nothing to do with any."""
        if not self._known:
            return None
        source, joiner = self._table.source, self._joiner
        return {
            "cluster": joiner.cluster if joiner is not None else "",
            "joiner": joiner.info() if joiner is not None else None,
            "session": source.session if source is not None else None,
            "pid": self._pid_of(source.session) if source is not None else None,
            "since": source.since if source is not None else None,
            "misses": len(self._table),
            "status": source.status if source is not None else {},
        }

    def _join(self, waiter: Waiter, run: Run[Waiter]) -> None:
        waiter.run = run
        run.waiters[waiter] = None

    def _offer(self, waiting: dict[Waiter, tuple[int, Answer]]) -> None:
        """Answer the source's requests that there are misses for; the others wait."""
        for waiter, (after, answer) in waiting.items():
            found = self._table.offer(after)
            if found:
                answer([self._shown(miss) for miss in found])
            else:
                self._waiting[waiter] = after, answer

    def _shown(self, miss: OpenMiss[Waiter]) -> Miss:
        run = miss.run
        key = run.key or run.former_key
        assert key is not None, "a run without a key is no miss"
        return Miss(miss.number, run.spec.name, key, run.spec.fingerprint, self._device)

    def _lose(self, why: str) -> None:
        source = self._table.source
        assert source is not None, "there is a source to lose"
        self._end_waits(None)
        for miss in self._table.lose():
            self._runs().drop(miss.run)
        waiting = len(self._table)
        if waiting:
            _log.warning("the source of records %s: %d misses wait %g s for another one", why, waiting, self._table.grace)
            self._wake_within(self._table.grace)

    def _end_waits(self, failure: Failure | None) -> None:
        """End the source's requests: with an error, or with no misses."""
        waiting, self._waiting = self._waiting, {}
        for waiter, (_, answer) in waiting.items():
            if failure is not None:
                tell(waiter, failure)
            else:
                answer([])

    def _error_of(self, earlier: Attachment) -> Failure:
        try:
            self._table.find(earlier.session, earlier.number)
        except ClusterError as error:
            return Failure.of(error)
        raise AssertionError("an earlier source is none any more")


def _names(misses: list[OpenMiss[Waiter]]) -> list[str]:
    shown = [miss.run.key or miss.run.former_key or miss.run.spec.name for miss in misses[:5]]
    return [*shown, f"{len(misses) - 5} more"] if len(misses) > 5 else shown
