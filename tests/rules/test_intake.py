"""Descriptors and memory that connections occupy in the process, and the connection that is closed to free some."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from shared_rpc.execution.stream import FramedStream
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.messages import Error
from shared_rpc.server.state import descriptors as module
from shared_rpc.server.state.descriptors import Descriptors, Intake
from tests.kit.processes import open_fds


class FakeConnection:
    """A connection with the resources that a test sets."""

    def __init__(self, held_fds: int = 0) -> None:
        self.held_fds = held_fds
        self.paused = False
        self.ended: list[str] = []

    def end(self, why: str) -> None:
        """Record the end of the connection."""
        self.ended.append(why)


@pytest.fixture
def intake() -> Intake:
    """The intake of a process with 1,600 descriptors, with a limit of 100 for each connection."""
    return Descriptors(lambda: 1600).intake


@pytest.fixture
def connected(intake: Intake) -> Callable[..., FakeConnection]:
    """Makes a connection."""

    def make(held_fds: int = 0) -> FakeConnection:
        connection = FakeConnection(held_fds)
        intake.connections[connection] = connection.end
        return connection

    return make


def test_the_connection_that_holds_most_descriptors_is_ended(intake: Intake, connected: Callable[..., FakeConnection]) -> None:
    """When a quarter is left, and only that one; those within their share stay even if objects exhaust the descriptors."""
    few, most, many = connected(100), connected(900), connected(200)
    intake.check(1199)
    assert not most.ended
    intake.check(1200)
    assert most.ended and "it holds 900 of 1600 descriptors, more than any other" in most.ended[0]
    assert not many.ended
    intake.check(1200)
    intake.check(1599)
    assert (len(few.ended), len(most.ended), len(many.ended)) == (0, 1, 1)


def test_the_oldest_incomplete_frame_is_dropped(
    intake: Intake, connected: Callable[..., FakeConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all together exceed their limit besides the largest: one large frame alone is allowed."""
    monkeypatch.setattr(module, "_PARTIAL", 1000)
    oldest, large, latest = connected(), connected(), connected()
    intake.note(oldest, 600, 1.0)
    intake.note(large, 5000, 2.0)
    intake.note(latest, 400, 3.0)
    assert not (oldest.ended or large.ended or latest.ended)
    intake.note(latest, 401, 4.0)
    assert len(oldest.ended) == 1
    intake.note(latest, 1000, 5.0)
    assert not (large.ended or latest.ended)


def test_stalled_frames_end_their_connection(intake: Intake, connected: Callable[..., FakeConnection]) -> None:
    """After a minute; connections that progress, or that are not being read, stay."""
    stalled, slow, paused, done = connected(), connected(), connected(), connected()
    for each in (stalled, slow, paused, done):
        intake.note(each, 24, 100.0)
    paused.paused = True
    intake.note(done, 0)
    assert intake.expire(100.0) == 60.0
    intake.note(slow, 25, 150.0)
    assert intake.expire(160.0) == 50.0
    assert len(stalled.ended) == 1
    assert not (slow.ended or paused.ended or done.ended)
    intake.leave(slow)
    intake.leave(paused)
    assert intake.expire(1000.0) is None


@pytest.mark.asyncio
async def test_queued_answers_use_no_descriptor() -> None:
    """A queued message references the owner of its descriptor until it is written, however often it is queued."""
    ours, theirs = socket.socketpair()
    stream = FramedStream(ours, lambda frame: None, lambda error: None, fd_backpressure=10)
    owner = Descriptor(os.memfd_create("memory"))
    before = open_fds()
    with theirs:
        while not stream.congested:
            stream.send(Error("x" * 1000, "", {}), 0, owners=(owner,))
        for _ in range(100):
            stream.send(w.Allocated(), 0, owners=(owner,))
        assert open_fds() == before
        assert stream.full
        assert stream.held_fds >= 100
        stream.close()
    del owner, stream
    assert open_fds() == before - 3
