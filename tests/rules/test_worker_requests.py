"""Requests to a worker: each answer resolves its request, whatever messages cross it."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from shared_rpc.broker.memory import RelayedMemory
from shared_rpc.broker.requests import WorkerRequests
from shared_rpc.errors import CapabilityError, WorkerCrashed
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.copies import CopyOrder
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Error, Message
from shared_rpc.protocol.records import SegmentInfo


class Link:
    """A link to a worker that answers on the test's command."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, int]] = []
        self.requests = WorkerRequests(self.send)

    def send(self, message: Message, number: int, *_: object) -> None:
        """Record a message."""
        self.sent.append((message, number))

    def says(self, message: Message, number: int, *fds: int) -> None:
        """Answer like a worker; the frame closes descriptors that remain in it."""
        frame = Frame(0, number, b"", b"", list(fds))
        self.requests.take(message, frame)
        frame.close()


@pytest.fixture
def link() -> Link:
    """A link before its first message."""
    return Link()


def is_open(fd: int) -> bool:
    """Return whether a descriptor is open."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.asyncio
async def test_each_answer_goes_to_its_request(link: Link) -> None:
    """In any order of the worker's answers."""
    asked = [asyncio.create_task(link.requests.request(w.FreeBytes(device))) for device in "ab"]
    await asyncio.sleep(0)
    for (_, number), free in zip(reversed(link.sent), (2, 1), strict=True):
        link.says(w.Allocated(free=free), number)
    assert [(await each)[0].free for each in asked] == [1, 2]
    assert len(link.requests) == 0


@pytest.mark.asyncio
async def test_a_workers_end_fails_its_requests(link: Link) -> None:
    """With its exit status."""
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
async def test_cancelled_requests_release_their_results(link: Link, crosses: bool) -> None:
    """The worker is asked to stop, unless its answer has arrived; the request counts until it is answered."""
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


# Requests for memory.


class FakeWorker:
    """A worker that serves endpoints, and records its messages."""

    def __init__(self, pid: int) -> None:
        self.pid, self.served, self.congested = pid, {"app": object()}, False
        self.keeps_memory = False
        self.sent: asyncio.Queue[int] = asyncio.Queue()
        self.requests = WorkerRequests(lambda message, number, *_: self.sent.put_nowait(number))


async def no_bare_worker() -> Any:
    """Fail to start a worker without the app."""
    raise WorkerCrashed("no worker can be started")


def answered(workers: list[Any], *then: Any) -> Any:
    """Return the result of :meth:`RelayedMemory.ask`, or raise; each of ``then`` gets a worker and its message's number."""

    supervisor: Any = SimpleNamespace(workers=workers, bare=no_bare_worker)

    async def play() -> Any:
        memory = RelayedMemory((), supervisor)
        asked = asyncio.create_task(memory.ask(w.FreeBytes("gpu")))
        for worker, step in zip(everybody, then, strict=False):
            step(worker, await asyncio.wait_for(worker.sent.get(), 5))
        return await asyncio.wait_for(asked, 5)

    everybody = list(workers)
    return asyncio.run(play())


def says(answer: Message) -> Any:
    """Answer like a worker."""
    return lambda worker, number: worker.requests.take(answer, Frame(0, number, b""))


def test_requests_move_to_another_worker() -> None:
    """When theirs ends, for example after a reload."""
    old, new = workers = [FakeWorker(1), FakeWorker(2)]

    def ends(worker: FakeWorker, number: int) -> None:
        workers.remove(worker)
        worker.requests.fail(WorkerCrashed("it ended"))

    answer, _ = answered(workers, ends, says(w.Allocated(free=7)))
    assert answer.free == 7
    assert (old.sent.qsize(), new.sent.qsize()) == (0, 0)


def test_a_request_fails_after_the_second_worker() -> None:
    """With the second one's exit status."""
    workers = [FakeWorker(1), FakeWorker(2), FakeWorker(3)]

    def ends(worker: FakeWorker, number: int) -> None:
        workers.remove(worker)
        worker.requests.fail(WorkerCrashed(f"the worker (pid {worker.pid}) ended"))

    with pytest.raises(WorkerCrashed, match="pid 2"):
        answered(workers, ends, ends)


def test_refusals_are_not_retried() -> None:
    """Another worker would refuse too."""
    with pytest.raises(CapabilityError, match="out of memory"):
        answered([FakeWorker(1), FakeWorker(2)], says(Error(CapabilityError.code, "out of memory")))


@pytest.mark.parametrize(("segments", "digests", "fds"), [(0, 0, 1), (1, 0, 1), (1, 1, 0), (1, 1, 2)])
def test_invalid_answers_are_crashes_and_close_their_descriptors(segments: int, digests: int, fds: int) -> None:
    """So the copy moves to another worker: too few segments, digests or descriptors, or too many of these."""
    received = [os.open(os.devnull, os.O_RDONLY) for _ in range(fds)]
    info = SegmentInfo("s-1", 1, "cpu")

    async def check() -> None:
        memory = RelayedMemory((), SimpleNamespace())  # type: ignore[arg-type]
        with HOST.create(1) as source, pytest.raises(WorkerCrashed, match=f"pid 7.* {fds} descriptors instead of 1"):
            memory._written([CopyOrder(source, info)], w.SegmentsCopied([info] * segments, [b""] * digests), received[:], 7)

    asyncio.run(check())
    assert not any(map(is_open, received))
