"""Copies of segments that workers make for a broker, which has no GPU's driver itself."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from shared_rpc.broker.worker import Handler, Worker
from shared_rpc.errors import CapabilityError, ProtocolError, SharedRPCError, WorkerCrashed, from_wire
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.copies import CopyCancelled, CopyOrder, Steps, Written, closing_all, on_host
from shared_rpc.memory.digests import DIGEST, PART
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame, close_all
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.records import SegmentInfo

__all__ = ["CopyRequests"]

#: Seconds in which a worker must make a step. The steps of a slow disk are the longest.
_PATIENCE = 60.0
#: Seconds between two looks whether a copy is still wanted.
_TURN = 0.1
#: Segments of one request: their descriptors, and those of as many targets, fit one frame.
_SEGMENTS = 256


class _Asked:
    """A request under way: what its worker says goes to the thread that waits for it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._news: queue.SimpleQueue[w.CopyProgress | Exception | tuple[w.SegmentsCopied, list[int]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False

    def tell(self, news: w.CopyProgress | Exception) -> None:
        """Pass on progress, or the worker's end."""
        self._news.put(news)

    def answer(self, message: w.SegmentsCopied, frame: Frame) -> None:
        """Pass on the answer; its descriptors stay the frame's if nothing waits for it any more."""
        with self._lock:
            if not self._over:
                self._news.put((message, frame.detach_fds()))

    def hear(self, seconds: float) -> w.CopyProgress | Exception | tuple[w.SegmentsCopied, list[int]] | None:
        """Return what comes next, None if nothing does in time."""
        try:
            return self._news.get(timeout=seconds)
        except queue.Empty:
            return None

    def end(self) -> None:
        """Wait for nothing more."""
        with self._lock:
            self._over = True
        with suppress(queue.Empty):
            while True:
                _discard(self._news.get_nowait())


class CopyRequests:
    """Requests for copies to workers.

    :param workers: returns the workers that may be asked, on the loop.
    :param bare: returns a worker without the app, for where none of them can.
    """

    def __init__(self, workers: Callable[[], list[Worker]], bare: Callable[[], Awaitable[Worker]]) -> None:
        self._workers = workers
        self._bare = bare
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self._asked: dict[int, _Asked] = {}
        #: The workers that have a copy's host memory mapped, by the copy's id.
        self._mapped: dict[str, set[Worker]] = {}

    def copy(self, orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
        """Have a worker make the ordered segments; from another thread.

        One that ends before it answers leaves nothing behind, so another one is asked, once.

        :raises SharedRPCError: as the worker does.
        :raises WorkerCrashed: if the second one ends too, or makes no step for long, or answers nonsense; or none can start.
        :raises CopyCancelled: if the copies are not wanted any more; the worker has stopped.
        """
        made: list[Written] = []
        with closing_all(made):
            for start in range(0, len(orders), _SEGMENTS):
                some, told = orders[start : start + _SEGMENTS], _Told(steps)
                try:
                    made += self._copied(some, told)
                except WorkerCrashed:
                    made += self._copied([_anew(order) for order in some], told)
        return made

    def _copied(self, orders: Sequence[CopyOrder], told: _Told) -> list[Written]:
        sources = [order.source for order in orders]
        targets = {number: order.target for number, order in enumerate(orders) if order.target is not None}
        message = w.CopySegments(
            [source.info for source in sources],
            [order.digest for order in orders],
            [order.wanted for order in orders],
            list(targets),
        )
        fds = tuple([segment.fileno() for segment in (*sources, *targets.values())])
        number, asked = asyncio.run_coroutine_threadsafe(self._begin(message, fds, told.worker), self._loop).result()
        told.worker = asked.worker
        try:
            answer, received = self._await(number, asked, told)
        finally:
            asked.end()
            self._on_loop(lambda: self._end(number, asked))
        return self._written(orders, answer, received, asked.worker)

    async def _begin(self, message: w.CopySegments, fds: tuple[int, ...], failed: Worker | None) -> tuple[int, _Asked]:
        worker = self._choose(message, failed) or await self._bare()
        number = next(self._numbers)
        asked = self._asked[number] = _Asked(worker)
        try:
            worker.send(message, number, b"", fds)
        except (ProtocolError, OSError) as error:
            del self._asked[number]
            raise CapabilityError(f"cannot send {len(fds)} descriptors to {_named(worker)}: {error}") from error
        worker.begin_order()
        return number, asked

    def _end(self, number: int, asked: _Asked) -> None:
        self._asked.pop(number, None)
        asked.worker.end_order()

    def _choose(self, message: w.CopySegments, failed: Worker | None) -> Worker | None:
        """Return the worker to ask: one that sees the GPUs; rather one that reads, and has the host memory mapped.

        :param failed: the one that was asked before, and is not asked again.
        """
        devices = {info.device for info in (*message.sources, *message.wanted)} - {"cpu"}
        mapping = {worker for info in message.sources for worker in self._mapped.get(info.id, ())}
        serving = [worker for worker in self._workers() if worker.served and worker is not failed]
        able = [worker for worker in serving if devices <= _devices_of(worker)]
        return min(able or serving, key=lambda worker: (worker.congested, worker not in mapping), default=None)

    def _await(self, number: int, asked: _Asked, told: _Told) -> tuple[w.SegmentsCopied, list[int]]:
        """Wait for the answer. A worker that is told to stop answers too."""
        worker, stopping = asked.worker, False
        last = time.monotonic()
        while True:
            news = asked.hear(_TURN)
            if isinstance(news, tuple):
                if stopping or news[0].stopped:
                    self._discard(news, worker)
                    raise CopyCancelled
                return news
            if isinstance(news, Exception):
                if stopping:
                    raise CopyCancelled
                raise news
            if news is not None:
                last = time.monotonic()
            elif time.monotonic() - last > _PATIENCE:
                self._on_loop(lambda: worker.send(w.StopCopy(), number))
                raise WorkerCrashed(f"{_named(worker)} has copied nothing for {_PATIENCE:g} s")
            if not stopping:
                try:
                    told.look(news)
                except CopyCancelled:
                    stopping = True
                    self._on_loop(lambda: worker.send(w.StopCopy(), number))

    def _written(
        self, orders: Sequence[CopyOrder], answer: w.SegmentsCopied, received: list[int], worker: Worker
    ) -> list[Written]:
        """Return what a worker has made.

        :raises WorkerCrashed: if that is not what was ordered.
        """
        problem = _problem(orders, answer, received)
        if problem:
            close_all(received)
            raise WorkerCrashed(f"{_named(worker)} did not make the copies that were ordered: {problem}")
        if answer.error:
            _raise(answer)
        left = iter(received)
        made = [
            Written(order.target.duplicate() if order.target is not None else Segment.owning(info, next(left)), digest)
            for order, info, digest in zip(orders, answer.segments, answer.digests, strict=True)
        ]
        for order, one in zip(orders, made, strict=True):
            if "file" not in (order.source.info.mechanism, one.segment.info.mechanism):
                for info in (order.source.info, one.segment.info):
                    if info.mechanism in ("host_vmm", "memfd"):
                        self._mapped.setdefault(info.id, set()).add(worker)
        return made

    def _discard(self, news: tuple[w.SegmentsCopied, list[int]], worker: Worker) -> None:
        _discard(news)
        copies = [info.id for info in news[0].segments]
        if copies:
            self._on_loop(lambda: worker.send(w.ForgetCopies(copies)))

    def forget(self, copy_id: str) -> None:
        """Have host memory unmapped whose copy is gone; from any thread, without waiting."""
        workers = self._mapped.pop(copy_id, None)
        if workers:
            self._on_loop(lambda: [worker.send(w.ForgetCopies([copy_id])) for worker in workers])

    def _on_loop(self, job: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the workers end too
            self._loop.call_soon_threadsafe(job)

    # Messages of workers. On the loop.

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """The handlers of workers' messages about copies."""
        return {w.CopyProgress: self._progressed, w.SegmentsCopied: self.answered}

    def _progressed(self, worker: Worker, message: w.CopyProgress, frame: Frame) -> None:
        asked = self._asked.get(frame.request_id)
        if asked is not None:
            asked.tell(message)

    def answered(self, worker: Worker, message: w.SegmentsCopied, frame: Frame) -> None:
        """Pass an answer to the thread that waits for it."""
        asked = self._asked.pop(frame.request_id, None)
        if asked is not None:
            asked.answer(message, frame)

    def lost(self, worker: Worker) -> None:
        """Fail the requests to a worker that has ended; what it had mapped is not mapped any more."""
        for number, asked in tuple(self._asked.items()):
            if asked.worker is worker:
                del self._asked[number]
                asked.tell(WorkerCrashed(f"{_named(worker)} ended while it copied an object"))
        for workers in tuple(self._mapped.values()):
            workers.discard(worker)


class _Told:
    """Progress of one request, which may be made again: what was told is not told twice."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._done = 0
        #: The worker that was asked last.
        self.worker: Worker | None = None

    def look(self, news: w.CopyProgress | None) -> None:
        """Tell of progress.

        :raises CopyCancelled: if the copy is not wanted any more.
        """
        if news is not None and news.done > self._done:
            more, self._done = news.done - self._done, news.done
            self._steps.count(more)
        else:
            self._steps.check()


def _anew(order: CopyOrder) -> CopyOrder:
    """Return an order that was given before. Host memory of then may be written to still: it is left alone."""
    if order.target is None or order.target.info.mechanism == "file":
        return order
    return CopyOrder(order.source, on_host(order.source.info))


def _devices_of(worker: Worker) -> set[str]:
    return {device.id for serve in worker.served.values() for device in serve.devices}


def _raise(answer: w.SegmentsCopied) -> NoReturn:
    error = from_wire(answer.error, answer.text, answer.detail)
    raise error if isinstance(error, SharedRPCError) else CapabilityError(answer.text)


def _discard(news: object) -> None:
    """Close what came with an answer for which nobody waits."""
    if isinstance(news, tuple):
        close_all(news[1])


def _named(worker: Worker) -> str:
    return f"the worker (pid {worker.pid})"


def _problem(orders: Sequence[CopyOrder], answer: w.SegmentsCopied, received: Sequence[int]) -> str:
    """Return what an answer has that was not ordered, ``""`` for nothing. The bytes are the worker's word."""
    if answer.error or answer.stopped:
        return f"{len(received)} descriptors came with a refusal" if received else ""
    if not len(orders) == len(answer.segments) == len(answer.digests):
        return f"{len(answer.segments)} segments and {len(answer.digests)} digests in place of {len(orders)}"
    if len(received) != sum(order.target is None for order in orders):
        return f"{len(received)} descriptors for {len(answer.segments)} segments"
    left = iter(received)
    for order, info, digest in zip(orders, answer.segments, answer.digests, strict=True):
        parts = -(-info.nbytes // PART) if info.mechanism == "file" else 0
        fits = _fits(order.wanted, info) if order.target is None else info == order.wanted
        if not fits or len(digest) != parts * DIGEST:
            return f"{info!r}"[:200] + f" with {len(digest)} bytes of digests in place of {order.wanted!r}"
        if order.target is None:
            fd = next(left)
            if info.mechanism == "memfd":
                try:
                    HOST.check(fd, info.nbytes)
                except CapabilityError as error:
                    return f"segment {info.id}: {error}"
    return ""


def _fits(wanted: SegmentInfo, info: SegmentInfo) -> bool:
    """Return whether a segment is the one that is wanted; where a driver makes no host memory, the kernel does."""
    if wanted.mechanism != "host_vmm" or info.mechanism != "memfd":
        return info == wanted
    nbytes = -(-wanted.nbytes // HOST.granularity) * HOST.granularity
    return info == msgspec.structs.replace(wanted, device="cpu", mechanism="memfd", nbytes=nbytes)
