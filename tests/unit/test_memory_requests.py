"""Memory that workers make for a broker, with workers that a test makes answer and end when it wants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared_rpc.broker.memory import WorkersMemory
from shared_rpc.broker.requests import WorkerRequests
from shared_rpc.errors import CapabilityError, WorkerCrashed
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Error, Message


class FakeWorker:
    """One that serves something, and notes what it is sent."""

    def __init__(self, pid: int) -> None:
        self.pid, self.served, self.congested = pid, {"app": object()}, False
        self.keeps_memory = False
        self.sent: asyncio.Queue[int] = asyncio.Queue()
        self.requests = WorkerRequests(lambda message, number, *_: self.sent.put_nowait(number))


async def no_bare_worker() -> Any:
    """Fail to start a worker without the app."""
    raise WorkerCrashed("no worker can be started")


def answered(workers: list[Any], *then: Any) -> Any:
    """What :meth:`WorkersMemory.ask` returns or raises; each of ``then`` gets a worker and the number that it was sent."""

    async def play() -> Any:
        memory = WorkersMemory(lambda: workers, no_bare_worker)
        asked = asyncio.create_task(memory.ask(w.FreeBytes("gpu")))
        for worker, step in zip(everybody, then, strict=False):
            step(worker, await asyncio.wait_for(worker.sent.get(), 5))
        return await asyncio.wait_for(asked, 5)

    everybody = list(workers)
    return asyncio.run(play())


def says(answer: Message) -> Any:
    """A worker answers."""
    return lambda worker, number: worker.requests.take(answer, Frame(0, number, b""))


def test_a_request_moves_to_another_worker_when_one_ends() -> None:
    """As one does that a reload has replaced."""
    old, new = workers = [FakeWorker(1), FakeWorker(2)]

    def ends(worker: FakeWorker, number: int) -> None:
        workers.remove(worker)
        worker.requests.fail(WorkerCrashed("it ended"))

    answer, _ = answered(workers, ends, says(w.Allocated(free=7)))
    assert answer.free == 7
    assert (old.sent.qsize(), new.sent.qsize()) == (0, 0)


def test_a_request_fails_after_the_second_worker() -> None:
    """Where the second one ends too, its end is told."""
    workers = [FakeWorker(1), FakeWorker(2), FakeWorker(3)]

    def ends(worker: FakeWorker, number: int) -> None:
        workers.remove(worker)
        worker.requests.fail(WorkerCrashed(f"the worker (pid {worker.pid}) ended"))

    with pytest.raises(WorkerCrashed, match="pid 2"):
        answered(workers, ends, ends)


def test_no_worker() -> None:
    """That is told at once."""
    with pytest.raises(WorkerCrashed, match="no worker runs"):
        answered([])


def test_a_refusal_is_told() -> None:
    """Another worker would say the same."""
    with pytest.raises(CapabilityError, match="out of memory"):
        answered([FakeWorker(1), FakeWorker(2)], says(Error(CapabilityError.code, "out of memory")))
