"""The source of records in operation: runs are offered to it as misses, and its answers end them."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from typing import TYPE_CHECKING

import msgspec

from shared_rpc.errors import CapabilityError, ProtocolError, from_wire
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import Run
from shared_rpc.memory.records import Record
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import sources as s
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.infos import SourceInfo
from shared_rpc.protocol.records import EMPTY_TABLE
from shared_rpc.protocol.sources import Miss
from shared_rpc.server.records import Records
from shared_rpc.server.requests import Caller, handles
from shared_rpc.server.runs import Runs
from shared_rpc.server.shared import State
from shared_rpc.server.waiting import Delivery, Signal, Waiter

if TYPE_CHECKING:
    from shared_rpc.server.joiner import Joiner


_log = logging.getLogger("shared_rpc.server")

#: The table of a result without a value.
_NO_TABLE = msgspec.Raw(EMPTY_TABLE)
#: Maximum bytes of a source's status, which every server info contains.
_STATUS = 64 << 10


def make_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_hex(32)


class Sources:
    """The source of records of a server, one at a time. On its loop only.

    :param records: checks and takes the records of answers.
    :param changed: set by the table of misses.
    :param joiner: starts sources, so that one is expected from the server's start on.
    """

    def __init__(self, state: State, runs: Runs, records: Records, changed: Signal, joiner: Joiner | None) -> None:
        #: Known to processes started by this server, see :meth:`attach`.
        self.token = make_token()
        self._state = state
        self._runs = runs
        self._records = records
        self._joiner = joiner
        self._table = state.misses
        #: True if a source was attached, or is expected: otherwise there is nothing to report.
        self._known = joiner is not None
        self._changed = changed

    # Requests of the source.

    @handles(s.AttachSource)
    def attach(self, caller: Caller, message: s.AttachSource) -> s.SourceAttached:
        """Make a session the source of records; an earlier one gets an error.

        :raises CapabilityError: if this server did not start its process: its answers are unpickled by the callers.
        """
        # The server's own process needs no proof.
        remote = self._state.sessions.peer_of(caller.session) is not None
        if remote and not hmac.compare_digest(message.token.encode(), self.token.encode()):
            raise CapabilityError(
                f"the server (pid {os.getpid()}) takes records from the process alone that it started and gave its token "
                f"(SHARED_TENSOR_SOURCE_TOKEN): have it start your program, by --cluster-program or Provider(cluster=…)"
            )
        self._state.sessions.trust(caller.session)
        earlier = self._table.source
        source = self._table.attach(caller.session)
        self._known = True
        if earlier is not None:
            pid_of = self._state.sessions.pid_of
            _log.warning(
                "pid %d is the source of records now, in place of pid %d", pid_of(caller.session), pid_of(earlier.session)
            )
        return s.SourceAttached(source.number, self._state.server_id)

    @handles(s.AwaitMisses)
    async def wait(self, caller: Caller, message: s.AwaitMisses) -> s.Misses:
        """Wait for open misses with numbers above the given one; none are left once the source was detached.

        :raises ClusterError: if the session is not that source.
        """
        source = self._table.find(caller.session, message.source)
        while not source.detached:
            self._table.find(caller.session, message.source)
            if found := self._table.offer(message.after):
                return s.Misses([self._shown(run) for run in found])
            await self._changed.wait()
        return s.Misses([])

    @handles(s.BuildMiss)
    def build(self, caller: Caller, message: s.BuildMiss) -> None:
        """Build the object of a miss here; the caller gets it too."""
        waiter = self._leased(caller)
        run = self._table.answer(caller.session, message.source, message.miss)
        self._join(waiter, run)
        self._runs.begin(run)

    @handles(s.AdoptMiss)
    def adopt(self, caller: Caller, message: s.AdoptMiss) -> None:
        """Answer an open miss with a record; the caller gets the object too."""
        header, session = RecordHeader.from_bytes(caller.payload), caller.session
        spec = self._table.open(session, message.source, message.miss).spec
        waiter = self._leased(caller)

        def take(record: Record) -> None:
            run = self._table.answer(session, message.source, message.miss)
            self._join(waiter, run)
            self._runs.adopt(run, record)

        self._records.answer(session, header, message.buffers, spec, take)

    @handles(s.FailMiss)
    def fail(self, caller: Caller, message: s.FailMiss) -> m.Count:
        """Answer a miss with an error."""
        error = from_wire(message.code, message.text, message.detail)
        failure = Failure(message.code, message.text, message.detail, message.pickled, error)
        self._runs.fail(self._table.answer(caller.session, message.source, message.miss), failure)
        return m.Count(1)

    @handles(s.ReportStatus)
    def report(self, caller: Caller, message: s.ReportStatus) -> m.Count:
        """Store the status reported by the source."""
        nbytes = len(msgspec.msgpack.encode(message.status))
        if nbytes > _STATUS:
            raise ProtocolError(f"the status of a source of records has {nbytes} bytes: report at most {_STATUS}")
        self._table.find(caller.session, message.source).status = message.status
        return m.Count(1)

    @handles(s.DetachSource)
    def detach(self, caller: Caller, message: s.DetachSource) -> m.Count:
        """Detach a source; the count is 0 if it was not attached."""
        found = self._table.source
        if found is None or (found.number, found.session) != (message.source, caller.session):
            return m.Count(0)
        self._lose("was closed")
        return m.Count(1)

    def _leased(self, caller: Caller) -> Waiter:
        """Register a request answered with a lease on the object, without its value."""
        waiter = caller.wait()

        def deliver(outcome: Delivery | Failure) -> None:
            if isinstance(outcome, Failure):
                caller.fail(outcome.seal())
                return
            stored = outcome.stored
            assert stored is not None and outcome.managed, "the object of a miss is managed"
            answer = m.Result(
                _NO_TABLE,
                [],
                object_id=stored.object_id,
                generation=stored.generation,
                managed=True,
                owner=self._state.server_id,
            )
            if not caller.reply(answer):
                self._state.release(caller.session, [stored.object_id])

        waiter.deliver = deliver
        return waiter

    # Calls from the server.

    def end_session(self, session: str) -> None:
        """Handle the end of a session, which may be the source's."""
        if self._table.source is not None and self._table.source.session == session:
            self._lose("has ended")

    def expire(self) -> float | None:
        """Build the misses here that no source has taken in time; return the seconds until the next check, None for never."""
        late, left = self._table.overdue()
        if late:
            _log.warning("no source of records for %g s: %s are built here", self._table.grace, ", ".join(_names(late)))
        for run in late:
            self._runs.begin(run)
        return left

    @property
    def pids(self) -> list[int]:
        """The processes of the source, which do not count as users of the server."""
        source, joiner = self._table.source, self._joiner.info()["pid"] if self._joiner is not None else None
        own = [self._state.sessions.pid_of(source.session)] if source is not None else []
        return own if joiner is None else [*own, joiner]

    def info(self) -> SourceInfo | None:
        """Describe the source; None if the server neither has nor expects one."""
        if not self._known:
            return None
        source, joiner = self._table.source, self._joiner
        return {
            "cluster": joiner.cluster if joiner is not None else "",
            "joiner": joiner.info() if joiner is not None else None,
            "session": source.session if source is not None else None,
            "pid": self._state.sessions.pid_of(source.session) if source is not None else None,
            "since": source.since if source is not None else None,
            "misses": len(self._table),
            "status": source.status if source is not None else {},
        }

    def _join(self, waiter: Waiter, run: Run[Waiter]) -> None:
        waiter.run = run
        run.waiters[waiter] = None

    def _shown(self, run: Run[Waiter]) -> Miss:
        key = run.key or run.former_key
        assert key is not None, "a run without a key is no miss"
        return Miss(run.miss, run.spec.name, key, run.spec.fingerprint, self._state.device)

    def _lose(self, why: str) -> None:
        for run in self._table.lose():
            self._runs.drop(run)
        waiting = len(self._table)
        if waiting:
            _log.warning("the source of records %s: %d misses wait %g s for another one", why, waiting, self._table.grace)
            self._state.wake_within(self._table.grace)


def _names(runs: list[Run[Waiter]]) -> list[str]:
    shown = [run.key or run.former_key or run.spec.name for run in runs[:5]]
    return [*shown, f"{len(runs) - 5} more"] if len(runs) > 5 else shown
