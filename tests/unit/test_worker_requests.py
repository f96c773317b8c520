"""Requests to a worker: answers find what waits for them, whatever crosses on the way."""

from __future__ import annotations

import asyncio
import os

import pytest

from shared_rpc.broker.requests import WorkerRequests
from shared_rpc.errors import WorkerCrashed
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message


class Link:
    """A link to a worker that answers when a test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, int]] = []
        self.requests = WorkerRequests(self.send)

    def send(self, message: Message, number: int, *_: object) -> None:
        """Note a message."""
        self.sent.append((message, number))

    def says(self, message: Message, number: int, *fds: int) -> None:
        """The worker answers; the frame closes what nothing takes."""
        frame = Frame(0, number, b"", b"", list(fds))
        self.requests.take(message, frame)
        frame.close()


@pytest.fixture
def link() -> Link:
    """A link to which nothing was sent."""
    return Link()


def is_open(fd: int) -> bool:
    """Whether a descriptor is open."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.asyncio
async def test_each_answer_goes_to_its_request(link: Link) -> None:
    """Whatever the order in which the worker answers."""
    asked = [asyncio.create_task(link.requests.request(w.FreeBytes(device))) for device in "ab"]
    await asyncio.sleep(0)
    for (_, number), free in zip(reversed(link.sent), (2, 1), strict=True):
        link.says(w.Allocated(free=free), number)
    assert [(await each)[0].free for each in asked] == [1, 2]
    assert len(link.requests) == 0


@pytest.mark.asyncio
async def test_a_workers_end_fails_its_requests(link: Link) -> None:
    """With how it ended."""
    asked = asyncio.create_task(link.requests.request(w.FreeBytes("a")))
    await asyncio.sleep(0)
    link.requests.fail(WorkerCrashed("the worker (pid 1) was killed"))
    with pytest.raises(WorkerCrashed, match="pid 1"):
        await asked
    assert len(link.requests) == 0


@pytest.mark.asyncio
async def test_progress_comes_before_the_answer(link: Link) -> None:
    """And does not end the request."""
    done: list[int] = []
    copying = link.requests.request(w.CopySegments([], [], [], []), progressed=lambda news: done.append(news.done))
    asked = asyncio.create_task(copying)
    await asyncio.sleep(0)
    link.says(w.CopyProgress(5), 1)
    link.says(w.SegmentsCopied([], []), 1)
    await asked
    assert done == [5]


@pytest.mark.parametrize("crosses", [False, True], ids=["before the answer", "after it"])
@pytest.mark.asyncio
async def test_a_cancelled_request_closes_what_was_made(link: Link, crosses: bool) -> None:
    """The worker is asked to stop, unless its answer has come; the request counts until it is answered."""
    unused: list[Message] = []
    asked = asyncio.create_task(link.requests.request(w.FreeBytes("a"), stop=w.Stop(), unused=unused.append))
    await asyncio.sleep(0)
    fd = os.open(os.devnull, os.O_RDONLY)
    if crosses:
        link.says(w.Allocated(), 1, fd)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    if not crosses:
        assert link.sent[-1] == (w.Stop(), 1) and len(link.requests) == 1
        link.says(w.CopyProgress(5), 1)
        link.says(w.Allocated(), 1, fd)
    assert unused == [w.Allocated()] and len(link.requests) == 0 and not is_open(fd)
