"""The source of records of a server, and its misses.

A *miss* is a run that waits for the source's answer. Rules:

- There is one source at a time. A new one replaces it, and gets all open misses.
- A miss given to the source continues without waiters, like a running endpoint; one that was not given is dropped.
- Without a source, misses wait for one until ``grace`` seconds after the last one was lost, or after the server's start if
  one is expected. After that, they and later ones are built here.
- A server that never had a source, and expects none, has no misses.
- An object that becomes current in another way answers the misses of its call, see
  :meth:`shared_rpc.server.runs.Runs.became_current`.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from shared_rpc.errors import CapabilityError, ClusterError, ProtocolError, from_wire
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import Run
from shared_rpc.memory.records import Record
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import sources as s
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.infos import ClusterStatus, SourceInfo
from shared_rpc.protocol.sources import Miss
from shared_rpc.server.records import Records
from shared_rpc.server.requests import Caller, handles
from shared_rpc.server.runs import Runs
from shared_rpc.server.shared import State
from shared_rpc.server.waiting import Delivery, Signal, Waiter

if TYPE_CHECKING:
    from shared_rpc.server.joiner import Joiner


_log = logging.getLogger("shared_rpc.server")

#: Maximum bytes of a source's status, which every server info contains.
_STATUS = 64 << 10


def make_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_hex(32)


class Attachment(msgspec.Struct, eq=False):
    """One attachment of a session as the source of records; ``since`` is in Unix seconds."""

    number: int
    session: str
    since: float
    status: ClusterStatus = msgspec.field(default_factory=ClusterStatus)


class Sources:
    """The source of records of a server, one at a time. On its loop only.

    :param runs: offers its misses here.
    :param records: checks and takes the records of answers.
    :param joiner: starts sources, so that one is expected from the server's start on.
    :param grace: seconds that misses wait for a source.
    """

    def __init__(self, state: State, runs: Runs, records: Records, joiner: Joiner | None, grace: float) -> None:
        #: Known to processes started by this server, see :meth:`attach`.
        self.token = make_token()
        self._state = state
        self._runs = runs
        self._records = records
        self._joiner = joiner
        self._grace = grace
        self._source: Attachment | None = None
        #: Set when there is a new miss, or the source changes.
        self._changed = Signal()
        self._misses = state.misses
        self._numbers = itertools.count(1)
        self._attachments = itertools.count(1)
        #: The time until which misses wait for a source, on the clock: in the past if none was attached or is expected.
        self._until = state.clock.now() + grace if joiner is not None else float("-inf")
        runs.ask = self.ask

    # Requests of the source.

    @handles(s.AttachSource)
    def attach(self, caller: Caller, message: s.AttachSource) -> m.Answer:
        """Make a session the source of records; an earlier one gets an error.

        :raises CapabilityError: if this server did not start its process: its answers are unpickled by the callers.
        """
        # The server's own process needs no proof.
        remote = self._state.sessions.peer_of(caller.session) is not None
        if remote and not hmac.compare_digest(message.token.encode(), self.token.encode()):
            raise CapabilityError(
                f"the server (pid {os.getpid()}) accepts records only from the process that it started with its token "
                f"(SHARED_TENSOR_SOURCE_TOKEN): let it start your program, by --cluster or Provider(cluster=…)"
            )
        self._state.sessions.trust(caller.session)
        earlier, clock = self._source, self._state.clock
        source = self._source = Attachment(next(self._attachments), caller.session, clock.unix(clock.now()))
        self._take_back()
        if earlier is not None:
            pid_of = self._state.sessions.pid_of
            _log.warning(
                "pid %d is the source of records now, in place of pid %d", pid_of(caller.session), pid_of(earlier.session)
            )
        return m.Answer.of((source.number, self._state.server_id))

    @handles(s.AwaitMisses)
    async def wait(self, caller: Caller, message: s.AwaitMisses) -> m.Answer:
        """Wait for open misses with numbers above the given one.

        :raises ClusterError: if the session is not that source, or no longer.
        """
        while True:
            self._find(caller.session, message.source)
            if found := [run for run in self._misses.values() if run.miss > message.after]:
                for run in found:
                    run.offered = True
                return m.Answer.of([self._shown(run) for run in found])
            await self._changed.wait()

    @handles(s.BuildMiss)
    def build(self, caller: Caller, message: s.BuildMiss) -> None:
        """Build the object of a miss here; the caller gets it too."""
        waiter = self._leased(caller)
        run = self._answered(caller.session, message)
        self._join(waiter, run)
        self._runs.begin(run)

    @handles(s.AdoptMiss)
    def adopt(self, caller: Caller, message: s.AdoptMiss) -> None:
        """Answer an open miss with a record; the caller gets the object too."""
        header, session = RecordHeader.from_bytes(caller.payload), caller.session
        spec = self._open(session, message).spec
        waiter = self._leased(caller)

        def take(record: Record) -> None:
            run = self._answered(session, message)
            self._join(waiter, run)
            self._runs.adopt(run, record)

        self._records.answer(session, header, message.buffers, spec, take)

    @handles(s.FailMiss)
    def fail(self, caller: Caller, message: s.FailMiss) -> m.Answer:
        """Answer a miss with an error."""
        error = from_wire(message.code, message.text, message.detail)
        failure = Failure(message.code, message.text, message.detail, message.pickled, error)
        self._runs.fail(self._answered(caller.session, message), failure)
        return m.Answer.of(None)

    @handles(s.ReportStatus)
    def report(self, caller: Caller, message: s.ReportStatus) -> m.Answer:
        """Store the status reported by the source."""
        nbytes = len(msgspec.msgpack.encode(message.status))
        if nbytes > _STATUS:
            raise ProtocolError(f"the status of a source of records has {nbytes} bytes: report at most {_STATUS}")
        self._find(caller.session, message.source).status = message.status
        return m.Answer.of(None)

    @handles(s.DetachSource)
    def detach(self, caller: Caller, message: s.DetachSource) -> m.Answer:
        """Detach a source, if it is attached."""
        with suppress(ClusterError):
            self._find(caller.session, message.source)
            self._lose("was closed")
        return m.Answer.of(None)

    def _find(self, session: str, number: int) -> Attachment:
        """Return the source with this number.

        :raises ClusterError: if it is no longer the source.
        """
        source = self._source
        if source is None:
            raise ClusterError(
                "this session is not the server's source of records: it was closed, or its session has ended. Attach it again",
                reason="detached",
            )
        if (source.session, source.number) != (session, number):
            raise ClusterError(
                f"this session is no longer the server's source of records: session {source.session} has replaced it (source "
                f"{source.number}), and answers all misses",
                reason="replaced",
            )
        return source

    def _open(self, session: str, message: s.BuildMiss | s.AdoptMiss | s.FailMiss) -> Run[Waiter]:
        """Return an open miss.

        :raises ClusterError: if the session is not that source, or the miss was answered.
        """
        self._find(session, message.source)
        run = self._misses.get(message.miss)
        if run is None:
            raise ClusterError(
                f"miss {message.miss} needs no answer: it was answered, or all of its callers have left", reason="answered"
            )
        return run

    def _answered(self, session: str, message: s.BuildMiss | s.AdoptMiss | s.FailMiss) -> Run[Waiter]:
        """Remove a miss that the source answers.

        :raises ClusterError: like :meth:`_open`.
        """
        run = self._open(session, message)
        self._remove(run)
        return run

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

    def ask(self, run: Run[Waiter]) -> bool:
        """Offer a run to the source, or let it wait for one; return False if it must be built here."""
        if self._source is None:
            if self._state.clock.now() >= self._until:
                return False
            self._state.wake_within(self._grace)
        run.miss = next(self._numbers)
        self._misses[run.miss] = run
        self._changed.set()
        return True

    def end_session(self, session: str) -> None:
        """Handle the end of a session, which may be the source's."""
        if self._source is not None and self._source.session == session:
            self._lose("has ended")

    def expire(self) -> float | None:
        """Build the misses here that no source has taken in time; return the seconds until the next check, None for never."""
        if self._source is not None or not self._misses:
            return None
        left = self._until - self._state.clock.now()
        if left > 0:
            return left
        late = list(self._misses.values())
        _log.warning("no source of records for %g s: %s are built here", self._grace, ", ".join(_names(late)))
        for run in late:
            self._remove(run)
        for run in late:
            self._runs.begin(run)
        return None

    @property
    def pids(self) -> list[int]:
        """The processes of the source, which do not count as users of the server."""
        source, joiner = self._source, self._joiner.info()["pid"] if self._joiner is not None else None
        own = [self._state.sessions.pid_of(source.session)] if source is not None else []
        return own if joiner is None else [*own, joiner]

    def info(self) -> SourceInfo | None:
        """Describe the source; None if the server neither has nor expects one."""
        source, joiner = self._source, self._joiner
        if source is None and self._until == float("-inf"):
            return None
        return {
            "cluster": joiner.cluster if joiner is not None else "",
            "joiner": joiner.info() if joiner is not None else None,
            "session": source.session if source is not None else None,
            "pid": self._state.sessions.pid_of(source.session) if source is not None else None,
            "since": source.since if source is not None else None,
            "misses": len(self._misses),
            "status": source.status if source is not None else {},
        }

    def _join(self, waiter: Waiter, run: Run[Waiter]) -> None:
        waiter.run = run
        run.waiters[waiter] = None

    def _shown(self, run: Run[Waiter]) -> Miss:
        assert run.key is not None, "a run without a key is no miss"
        return Miss(run.miss, run.spec.name, run.key, run.spec.fingerprint, self._state.device)

    def _take_back(self) -> None:
        for run in self._misses.values():
            run.offered = False
        self._changed.set()

    def _remove(self, run: Run[Waiter]) -> None:
        del self._misses[run.miss]
        run.miss, run.offered = 0, False

    def _lose(self, why: str) -> None:
        """Handle the loss of the source."""
        self._source = None
        self._until = self._state.clock.now() + self._grace
        self._take_back()
        for run in [run for run in self._misses.values() if not run.waiters]:
            self._runs.drop(run)
        if waiting := len(self._misses):
            _log.warning("the source of records %s: %d misses wait %g s for another one", why, waiting, self._grace)
            self._state.wake_within(self._grace)


def _names(runs: list[Run[Waiter]]) -> list[str]:
    shown = [run.key or run.spec.name for run in runs[:5]]
    return [*shown, f"{len(runs) - 5} more"] if len(runs) > 5 else shown
