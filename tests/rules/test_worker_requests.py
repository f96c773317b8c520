"""Requests to a worker: each answer resolves its request, whatever messages cross it."""

from __future__ import annotations

import asyncio
import functools
import os
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock
from weakref import WeakSet

import anyio
import pytest

from shared_rpc.broker import memory as broker_memory
from shared_rpc.broker import supervisor
from shared_rpc.broker.memory import RelayedMemory
from shared_rpc.broker.requests import WorkerRequests
from shared_rpc.broker.supervisor import Supervisor
from shared_rpc.broker.worker import WorkerCommand
from shared_rpc.errors import CapabilityError, WorkerCrashed
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.copies import CopyOrder
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Error, Message
from shared_rpc.protocol.records import Mechanism, SegmentInfo


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
    asked = asyncio.create_task(link.requests.request(w.FreeBytes("a"), unused=unused.append))
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
    """A worker that sees a GPU, and records its messages."""

    def __init__(self, pid: int, gpu: str = "gpu") -> None:
        self.pid, self.congested, self.bare = pid, False, gpu == ""
        self.served = {"app": SimpleNamespace(devices=[SimpleNamespace(id=gpu)])}
        self.memory: WeakSet[Descriptor] = WeakSet()
        self.retire = Mock()
        self.sent: asyncio.Queue[int] = asyncio.Queue()
        self.requests = WorkerRequests(lambda message, number, *_: self.sent.put_nowait(number))


def allocated(workers: list[Any], *then: Any, bare: Any = None) -> str:
    """Return the id of a segment allocated on the GPU, or raise.

    :param then: each gets the next of the workers that get the request, and the request's number.
    :param bare: the worker without the app; None if none can be started.
    """

    async def start_bare() -> Any:
        if bare is None:
            raise WorkerCrashed("no worker can be started")
        return bare

    able = [worker for worker in (*workers, bare) if worker is not None and ("gpu" in gpus_of(worker) or worker.bare)]
    supervisor: Any = SimpleNamespace(workers=workers, bare=start_bare)

    async def play() -> str:
        asked = asyncio.create_task(RelayedMemory((), supervisor).allocate("gpu", 1))
        for worker, step in zip(able, then, strict=False):
            step(worker, await asyncio.wait_for(worker.sent.get(), 5))
        with closing(await asyncio.wait_for(asked, 5)) as segment:
            return segment.info.id

    return asyncio.run(play())


def gpus_of(worker: FakeWorker) -> list[str]:
    """Return the GPUs that a worker sees."""
    return [device.id for served in worker.served.values() for device in served.devices]


def says(answer: Message) -> Any:
    """Answer like a worker."""
    return lambda worker, number: worker.requests.take(answer, Frame(0, number, b""))


def allocates(worker: FakeWorker, number: int, fds: int = 1, mechanism: Mechanism = "vmm") -> None:
    """Answer with a segment that is named after the worker."""
    info = SegmentInfo(str(worker.pid), 1, "gpu", mechanism=mechanism)
    frame = Frame(0, number, b"", b"", [os.open(os.devnull, os.O_RDONLY) for _ in range(fds)])
    worker.requests.take(w.Allocated(info), frame)


def ends(worker: FakeWorker, number: int) -> None:
    """End instead of an answer."""
    worker.requests.fail(WorkerCrashed(f"the worker (pid {worker.pid}) ended"))


def hangs(worker: FakeWorker, number: int) -> None:
    """Do not answer."""


def test_requests_move_to_another_worker() -> None:
    """When theirs ends."""
    assert allocated([FakeWorker(1), FakeWorker(2)], ends, allocates) == "2"


def test_a_stuck_worker_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one gets the request, or the worker without the app if there is no other."""
    monkeypatch.setattr(broker_memory, "_PATIENCE", 0.05)
    assert allocated([FakeWorker(1), FakeWorker(2)], hangs, allocates) == "2"
    assert allocated([FakeWorker(1)], hangs, allocates, bare=FakeWorker(3, "")) == "3"


def test_workers_that_do_not_see_the_gpu_are_not_asked() -> None:
    """The worker without the app does."""
    assert allocated([FakeWorker(1, "other")], allocates, bare=FakeWorker(3, "")) == "3"


@pytest.mark.asyncio
async def test_an_idle_bare_worker_ends_once_its_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of mechanisms without memory of their own would end with it."""
    workers = Supervisor(WorkerCommand("app.py"), Mock(), Mock(), Mock())
    workers._bare = worker = cast("Any", FakeWorker(3, ""))
    monkeypatch.setattr(workers, "bare", AsyncMock(return_value=worker))
    asked = asyncio.create_task(RelayedMemory((), workers).allocate("gpu", 1))
    allocates(worker, await asyncio.wait_for(worker.sent.get(), 5), mechanism="ipc")
    segment = await asked
    monkeypatch.setattr(supervisor, "_UNUSED", 0.0)
    monkeypatch.setattr(anyio, "sleep", AsyncMock(side_effect=(segment.close() for _ in range(1))))
    await workers._end_unused(worker)
    assert segment.closed and worker.retire.called


@pytest.mark.asyncio
async def test_the_free_memory_of_all_devices_is_requested_at_once() -> None:
    """So a stuck worker delays the answer only once."""
    workers = [FakeWorker(1, "a"), FakeWorker(2, "b")]
    supervisor: Any = SimpleNamespace(workers=workers)
    devices: Any = [SimpleNamespace(id=name) for name in "ab"]
    asked = asyncio.create_task(RelayedMemory(devices, supervisor).devices())
    numbers = [await asyncio.wait_for(worker.sent.get(), 5) for worker in workers]
    for worker, number in zip(workers, numbers, strict=True):
        says(w.Allocated(free=worker.pid))(worker, number)
    assert await asked == [(devices[0], 1), (devices[1], 2)]


def test_a_request_fails_after_the_second_worker() -> None:
    """With the second one's exit status."""
    with pytest.raises(WorkerCrashed, match="pid 2"):
        allocated([FakeWorker(1), FakeWorker(2), FakeWorker(3)], ends, ends)


def test_allocations_with_a_wrong_number_of_descriptors_are_crashes(no_leaks: None) -> None:
    """So the request moves to another worker; the descriptors are closed."""
    with pytest.raises(WorkerCrashed, match=r"pid 2.*0 descriptors instead of 1"):
        allocated([FakeWorker(1), FakeWorker(2)], functools.partial(allocates, fds=2), functools.partial(allocates, fds=0))


def test_refusals_are_not_retried() -> None:
    """Another worker would refuse too."""
    with pytest.raises(CapabilityError, match="out of memory"):
        allocated([FakeWorker(1), FakeWorker(2)], says(Error(CapabilityError.code, "out of memory")))


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
