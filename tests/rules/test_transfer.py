"""Pool memory that an idle client returns to the server, also where the last reference is a GPU's."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from shared_rpc.client import transfer as lane_module
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.memory import chunk_references
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.backends.host import MemfdBackend
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.devices import device_id
from shared_rpc.memory.pool import Pool, PoolOptions


class Gpu(MemfdBackend):
    """Host memory on a device that is busy until ``done``, and counts its marks."""

    unmaps_in_background = False
    done = False
    marked = 0

    def fence(self) -> Callable[[], bool]:
        """Return a fence of the queued work, which is complete when ``done`` is True."""
        self.marked += 1
        return lambda: self.done


class Clock:
    """The time, and a finaliser thread that runs its jobs when they are due."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.jobs: list[tuple[float, int, Callable[[], object]]] = []
        self.numbers = itertools.count()

    def monotonic(self) -> float:
        """See ``time.monotonic``."""
        return self.now

    def start(self) -> None:
        """See ``FINALIZER``."""

    def submit(self, job: Callable[[], object], after: float = 0.0) -> None:
        """See ``FINALIZER``."""
        heapq.heappush(self.jobs, (self.now + after, next(self.numbers), job))

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.jobs and self.jobs[0][0] <= end:
            self.now, _, job = heapq.heappop(self.jobs)
            job()
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the transfer."""
    clock = Clock()
    monkeypatch.setattr(lane_module, "FINALIZER", clock)
    monkeypatch.setattr(lane_module, "time", clock)
    monkeypatch.setattr(chunk_references, "time", clock)
    return clock


class Idle:
    """A client that has dropped results of a server's pool on a GPU, and sends nothing by itself.

    :ivar sent: the chunk numbers of each message to the server.
    """

    def __init__(self, clock: Clock, pool: Pool) -> None:
        self.clock, self.gpu, self._pool = clock, Gpu(), pool
        self.sent: list[list[int]] = []
        self.transfer = ClientTransfer(PoolOptions(), lambda _, chunks: self.sent.append(chunks))

    def drop(self, count: int = chunk_references._BATCH) -> list[int]:
        """Receive results, by default as many as are marked together, and drop them; return their chunks."""
        return lend(self.transfer.references, self._pool, self.gpu, count)

    def request(self) -> list[int]:
        """Return the chunks that a request includes, and those returned while the server works: then the GPU is marked."""
        chunks = self.transfer.returned()
        self.transfer.poll()
        return chunks


@pytest.fixture
def idle(clock: Clock) -> Iterator[Idle]:
    """The client's side of a session."""
    with closing(Pool(PoolOptions())) as pool:
        idle = Idle(clock, pool)
        with closing(idle.transfer):
            yield idle


def lend(references: ChunkReferences, pool: Pool, gpu: Gpu, count: int) -> list[int]:
    """Use so many chunks, and end; return their numbers."""
    chunks = pool.acquire("cpu", [16] * count)
    assert chunks is not None
    chunks[0].arena.mapping.backend = gpu
    storages = [torch.zeros(4).untyped_storage() for _ in chunks]
    for chunk, storage in zip(chunks, storages, strict=True):
        references.acquire(chunk.number, 16, chunk.arena.mapping, [storage])
    return [chunk.number for chunk in chunks]


def test_chunks_of_a_silent_client_are_returned(idle: Idle) -> None:
    """In a message of their own, soon after the last request, once the GPU does not use them; its work is marked once."""
    numbers = idle.drop()
    idle.clock.advance(0.1)
    assert idle.request() == []
    idle.clock.advance(5)
    assert (idle.sent, idle.gpu.marked) == ([], 1)
    idle.gpu.done = True
    idle.clock.advance(0.1)
    assert [sorted(message) for message in idle.sent] == [sorted(numbers)]
    assert idle.clock.jobs == []


def test_chunks_are_returned_with_requests(idle: Idle) -> None:
    """No other message is sent until then."""
    numbers = idle.drop()
    for done in (False, False, True):
        assert idle.request() == []
        idle.gpu.done = done
        idle.clock.advance(0.04)
    assert sorted(idle.request()) == sorted(numbers)
    idle.clock.advance(60)
    assert (idle.sent, idle.clock.jobs) == ([], [])


def test_a_gpu_that_must_not_be_marked_waits_for_a_request(idle: Idle) -> None:
    """Another thread might be capturing a CUDA graph."""
    numbers = idle.drop()
    idle.gpu.done = True
    idle.clock.advance(60)
    assert (idle.sent, idle.gpu.marked) == ([], 0)
    idle.request()
    assert sorted(idle.request()) == sorted(numbers)


def test_few_chunks_are_marked_after_a_second_of_requests(idle: Idle) -> None:
    """A small pool may have no more: it would stay full."""
    numbers, idle.gpu.done = idle.drop(1), True
    for _ in range(2):
        idle.request()
        idle.clock.advance(0.4)
    assert idle.gpu.marked == 0
    idle.clock.advance(0.4)
    idle.request()
    assert idle.request() == numbers
    idle.clock.advance(5)
    numbers = idle.drop(1)
    idle.clock.advance(0.1)  # in the background, where the GPU must not be marked
    idle.request()
    assert idle.request() == numbers


@pytest.mark.gpu
def test_events_are_queried_without_a_current_context() -> None:
    """A thread may query an event of a context that is not current there: active work is not reported as complete."""
    backend = backend_for(device_id("cuda"))
    answers: list[bool] = []
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    passed = backend.fence()
    assert passed is not None, "cuCtxRecordEvent needs CUDA 12.5"

    def ask() -> None:
        thread = threading.Thread(target=lambda: answers.append(passed()))
        thread.start()
        thread.join()

    ask()
    torch.cuda.synchronize()
    ask()
    assert answers == [False, True]
