"""The source of records, and the misses without an answer: the rules, without clients and endpoints."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shared_rpc.errors import ClusterError
from shared_rpc.execution.run import Run
from shared_rpc.protocol.sources import AttachSource, AwaitMisses, FailMiss
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.sources import Sources
from shared_rpc.server.state.runs import RunTable
from tests.kit.clock import Clock

GRACE = 15.0


class Server:
    """The sources of a server that has no clients: its runs are only recorded."""

    def __init__(self, joiner: Any = None) -> None:
        self.clock = Clock()
        self.misses: dict[int, Run[str]] = {}
        self.built: list[Run[str]] = []
        self.dropped: list[Run[str]] = []
        self.failed: list[Run[str]] = []
        sessions = SimpleNamespace(peer_of=lambda session: None, pid_of=lambda session: 1, trust=lambda session: None)
        names = {"device": "cpu", "server_id": "server", "wake_within": lambda seconds: None}
        state: Any = SimpleNamespace(clock=self.clock, misses=self.misses, sessions=sessions, **names)
        runs: Any = SimpleNamespace(begin=self.built.append, drop=self.drop, fail=lambda run, failure: self.failed.append(run))
        records: Any = None
        self.sources = Sources(state, runs, records, joiner, GRACE)

    def drop(self, run: Run[str]) -> None:
        """Drop a run, which is no miss any more."""
        del self.misses[run.miss]
        self.dropped.append(run)

    def ask(self, key: str = "f()") -> Run[str] | None:
        """Return a new run with a waiting caller, if it is a miss."""
        run: Run[Any] = Run(EndpointSpec("f", []), key, ((), {}), {"waiter": None})
        return run if self.sources.ask(run) else None

    def attach(self, session: str) -> int:
        """Make a session the source; return its number."""
        caller: Any = SimpleNamespace(session=session)
        return AttachSource.read(self.sources.attach(caller, AttachSource()))[0]

    def offered(self, session: str, source: int, after: int = 0) -> list[int]:
        """Return the numbers of the misses that a source gets, of which there are some."""
        caller: Any = SimpleNamespace(session=session)
        answer = asyncio.run(self.sources.wait(caller, AwaitMisses(source, after)))
        return [miss.id for miss in AwaitMisses.read(answer)]

    def answer(self, session: str, source: int, miss: int) -> None:
        """Answer a miss."""
        caller: Any = SimpleNamespace(session=session)
        self.sources.fail(caller, FailMiss(source, miss, "remote", "no", {}, b""))


@pytest.fixture
def server() -> Server:
    """A server without a source, which expects none."""
    return Server()


def test_misses_are_in_order_of_arrival(server: Server) -> None:
    """The source gets the ones above its position, repeatedly if it asks again."""
    source = server.attach("s")
    assert [run.miss for run in (server.ask(), server.ask(), server.ask()) if run is not None] == [1, 2, 3]
    assert server.offered("s", source) == server.offered("s", source) == [1, 2, 3]
    assert server.offered("s", source, after=2) == [3]


def test_misses_are_answered_once(server: Server) -> None:
    """Unknown ones cannot be answered either."""
    source, run = server.attach("s"), server.ask()
    server.answer("s", source, 1)
    assert run is not None and server.failed == [run] and not run.miss
    for number in (1, 2):
        with pytest.raises(ClusterError) as caught:
            server.answer("s", source, number)
        assert caught.value.reason == "answered"


@pytest.mark.parametrize("other", ["s", "t"])
def test_the_latest_attachment_is_the_source(server: Server, other: str) -> None:
    """Also of the same session; it gets all open misses, and the earlier one can answer none."""
    first, run = server.attach("s"), server.ask()
    server.offered("s", first)
    second = server.attach(other)
    assert run is not None and not run.offered
    for attempt in (lambda: server.answer("s", first, 1), lambda: server.offered("s", first)):
        with pytest.raises(ClusterError, match="has replaced it") as caught:
            attempt()
        assert caught.value.reason == "replaced"
    assert server.offered(other, second) == [1]
    server.answer(other, second, 1)
    assert server.failed == [run]


def test_other_sessions_cannot_answer_for_the_source(server: Server) -> None:
    """The numbers are no secret."""
    source = server.attach("s")
    for session, reason in (("t", "replaced"), ("s", "detached")):
        with pytest.raises(ClusterError) as caught:
            server.answer(session, source, 1)
        assert caught.value.reason == reason
        server.sources.end_session("s")


def test_misses_of_a_lost_source_wait_for_the_grace_period(server: Server) -> None:
    """As do those that arrive in the meantime; later ones are built here."""
    server.attach("s")
    early = server.ask()
    server.sources.end_session("s")
    assert server.sources.expire() == GRACE
    server.clock.time += GRACE / 2
    late = server.ask()
    assert server.sources.expire() == GRACE / 2
    server.clock.time += GRACE / 2
    assert server.sources.expire() is None and server.built == [early, late]
    assert [run.miss for run in server.built] == [0, 0] and not server.misses
    assert server.ask() is None


def test_a_source_that_attaches_in_time_gets_the_misses(server: Server) -> None:
    """They are no longer overdue."""
    server.attach("s")
    server.ask()
    server.sources.end_session("s")
    server.clock.time += GRACE / 2
    source = server.attach("t")
    server.clock.time += 10 * GRACE
    assert server.sources.expire() is None and server.built == []
    assert server.offered("t", source) == [1]


def test_an_expected_source_is_waited_for_from_the_start() -> None:
    """During the grace period."""
    server = Server(joiner=SimpleNamespace())
    miss = server.ask()
    server.clock.time += GRACE
    server.sources.expire()
    assert server.built == [miss] and server.ask() is None


def test_misses_without_waiters_end_with_their_source(server: Server) -> None:
    """Others are kept."""
    source, left, kept = server.attach("s"), server.ask(), server.ask()
    server.offered("s", source)
    assert left is not None
    left.waiters.clear()
    server.sources.end_session("s")
    assert server.dropped == [left] and list(server.misses.values()) == [kept]


@pytest.mark.parametrize("offered", [False, True])
def test_given_misses_continue_without_waiters(server: Server, offered: bool) -> None:
    """Like a begun endpoint."""
    runs: RunTable[str] = RunTable()
    source, run = server.attach("s"), server.ask()
    assert run is not None
    runs.open(run)
    if offered:
        server.offered("s", source)
    assert runs.leave(run, "waiter") is not offered
