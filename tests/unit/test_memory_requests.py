"""Memory that workers make for a broker, with workers that a test makes answer and end when it wants."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shared_rpc.broker.memory import MemoryRequests
from shared_rpc.errors import CapabilityError, WorkerCrashed
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message


class FakeWorker:
    """One that serves something, and keeps what it was sent."""

    def __init__(self, pid: int) -> None:
        self.pid, self.served, self.congested = pid, {"app": object()}, False
        self.keeps_memory = False
        self.sent: asyncio.Queue[int] = asyncio.Queue()

    def begin_order(self) -> None:
        """Ignore it: this worker does not end by itself."""

    def end_order(self) -> None:
        """Ignore it as well."""

    def send(self, message: Message, number: int) -> None:
        """The broker asks."""
        self.sent.put_nowait(number)


async def no_bare_worker() -> Any:
    """Fail to start a worker without the app."""
    raise WorkerCrashed("no worker can be started")


def answered(workers: list[Any], *then: Any) -> Any:
    """What :meth:`MemoryRequests.ask` returns or raises; each of ``then`` gets the requests and the number that was sent."""

    async def play() -> Any:
        requests = MemoryRequests(lambda: workers, no_bare_worker)
        asked = asyncio.create_task(asyncio.to_thread(requests.ask, w.FreeBytes("gpu")))
        for number, step in enumerate(then):
            step(requests, await asyncio.wait_for(everybody[number].sent.get(), 5))
        return await asyncio.wait_for(asked, 5)

    everybody = list(workers)
    return asyncio.run(play())


def says(free: int | None = None, error: str = "") -> Any:
    """A worker answers."""
    return lambda requests, number: requests.answered(
        cast(Any, FakeWorker(0)), w.Allocated(free=free, error=error), Frame(0, number, b"")
    )


def test_another_worker_is_asked_where_one_ends() -> None:
    """As one does that a reload has replaced."""
    old, new = workers = [FakeWorker(1), FakeWorker(2)]

    def ends(requests: MemoryRequests, number: int) -> None:
        workers.remove(old)
        requests.lost(old)

    answer, _ = answered(workers, ends, says(free=7))
    assert answer.free == 7
    assert (old.sent.qsize(), new.sent.qsize()) == (0, 0)


def test_nobody_is_asked_for_ever() -> None:
    """Where the second one ends too, its end is told."""
    workers = [FakeWorker(1), FakeWorker(2), FakeWorker(3)]

    def ends(requests: MemoryRequests, number: int) -> None:
        requests.lost(workers.pop(0))

    with pytest.raises(WorkerCrashed, match="pid 2"):
        answered(workers, ends, ends)


def test_no_worker() -> None:
    """That is told at once."""
    with pytest.raises(WorkerCrashed, match="no worker runs"):
        answered([])


def test_a_refusal_is_told() -> None:
    """Another worker would say the same."""
    with pytest.raises(CapabilityError, match="out of memory"):
        answered([FakeWorker(1), FakeWorker(2)], says(error="out of memory"))
