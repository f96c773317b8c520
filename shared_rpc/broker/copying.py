"""Copies of segments that workers make for a broker, which has no GPU's driver itself."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from shared_rpc.broker.worker import Handler, Worker
from shared_rpc.errors import CapabilityError, ProtocolError, SharedRPCError, WorkerCrashed, from_wire
from shared_rpc.memory.copies import CopyCancelled, CopyOrder, Steps, Written, closing_all
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message

__all__ = ["CopyRequests"]

#: Seconds in which a worker must make a step. The steps of a slow disk are the longest.
_PATIENCE = 60.0
#: Seconds between two looks whether a copy is still wanted.
_TURN = 0.1
#: Segments of one request: their descriptors, and those of as many files, fit one frame.
_SEGMENTS = 256


class _NoWorker(WorkerCrashed):
    """No worker can be asked."""


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
        """Pass on the answer; its descriptors stay the frame's if nobody waits any more."""
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
    """

    def __init__(self, workers: Callable[[], list[Worker]]) -> None:
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self._asked: dict[int, _Asked] = {}
        #: The workers that have a copy's host memory mapped, by the copy's id.
        self._mapped: dict[str, set[Worker]] = {}

    def copy(self, orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
        """Have a worker make the ordered segments; from another thread.

        One that ends before it answers leaves nothing behind, so another one is asked, once: after a reload there is one.

        :raises SharedRPCError: as the worker does.
        :raises WorkerCrashed: if no worker is there, or the second one ends too, or one makes no step for long.
        :raises CopyCancelled: if the copies are not wanted any more; the worker has stopped.
        """
        made: list[Written] = []
        with closing_all(made):
            for start in range(0, len(orders), _SEGMENTS):
                some, told = orders[start : start + _SEGMENTS], _Told(steps)
                try:
                    made += self._copied(some, told)
                except WorkerCrashed as crash:
                    try:
                        made += self._copied(some, told)
                    except _NoWorker:
                        raise crash from None
        return made

    def _copied(self, orders: Sequence[CopyOrder], told: _Told) -> list[Written]:
        sources = [order.source for order in orders]
        files = [order.target for order in orders if order.target is not None]
        message = w.CopySegments(
            [source.info for source in sources], [order.digest for order in orders], [order.wanted for order in orders]
        )
        fds = tuple([segment.fileno() for segment in (*sources, *files)])
        number, asked = asyncio.run_coroutine_threadsafe(self._begin(message, fds), self._loop).result()
        try:
            answer, received = self._await(number, asked, told)
        finally:
            asked.end()
            self._on_loop(lambda: self._asked.pop(number, None))
        return self._written(orders, answer, received, asked.worker)

    async def _begin(self, message: w.CopySegments, fds: tuple[int, ...]) -> tuple[int, _Asked]:
        worker = self._choose(message)
        number = next(self._numbers)
        asked = _Asked(worker)
        try:
            worker.send(message, number, b"", fds)
        except (ProtocolError, OSError) as error:
            raise CapabilityError(f"cannot send {len(fds)} descriptors to worker {worker.pid}: {error}") from error
        self._asked[number] = asked
        return number, asked

    def _choose(self, message: w.CopySegments) -> Worker:
        """Return the worker to ask: one that sees the GPUs and, where there is one, has the host memory mapped."""
        devices = {info.device for info in (*message.sources, *message.wanted)} - {"cpu"}
        mapping = {worker for info in message.sources for worker in self._mapped.get(info.id, ())}
        serving = [worker for worker in self._workers() if worker.served]
        able = [worker for worker in serving if devices <= _devices_of(worker)] or serving
        worker = min(able, key=lambda worker: (worker.congested, worker not in mapping), default=None)
        if worker is None:
            raise _NoWorker("no worker runs that could copy GPU memory: try again when one has loaded the app")
        return worker

    def _await(self, number: int, asked: _Asked, told: _Told) -> tuple[w.SegmentsCopied, list[int]]:
        """Wait for the answer. A worker that is told to stop answers too."""
        stopping = False
        last = time.monotonic()
        while True:
            news = asked.hear(_TURN)
            if isinstance(news, tuple):
                if stopping or news[0].stopped:
                    self._discard(news, asked.worker)
                    raise CopyCancelled
                return news
            if isinstance(news, Exception):
                if stopping:
                    raise CopyCancelled
                raise news
            if news is not None:
                last = time.monotonic()
            elif time.monotonic() - last > _PATIENCE:
                self._on_loop(lambda: asked.worker.send(w.StopCopy(), number))
                raise WorkerCrashed(f"the worker (pid {asked.worker.pid}) has copied nothing for {_PATIENCE:g} s")
            if not stopping:
                try:
                    told.look(news)
                except CopyCancelled:
                    stopping = True
                    self._on_loop(lambda: asked.worker.send(w.StopCopy(), number))

    def _written(
        self, orders: Sequence[CopyOrder], answer: w.SegmentsCopied, received: list[int], worker: Worker
    ) -> list[Written]:
        """Return what a worker has made."""
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
        """The handlers of messages about copies."""
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
                asked.tell(WorkerCrashed(f"the worker (pid {worker.pid}) ended while it copied an object"))
        for workers in tuple(self._mapped.values()):
            workers.discard(worker)


class _Told:
    """Progress of one request, which may be made again: what was told is not told twice."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._done = 0

    def look(self, news: w.CopyProgress | None) -> None:
        """Tell of progress.

        :raises CopyCancelled: if the copy is not wanted any more.
        """
        if news is not None and news.done > self._done:
            more, self._done = news.done - self._done, news.done
            self._steps.count(more)
        else:
            self._steps.check()


def _devices_of(worker: Worker) -> set[str]:
    return {device.id for serve in worker.served.values() for device in serve.devices}


def _raise(answer: w.SegmentsCopied) -> NoReturn:
    error = from_wire(answer.error, answer.text, answer.detail)
    raise error if isinstance(error, SharedRPCError) else CapabilityError(answer.text)


def _discard(news: object) -> None:
    """Close what came with an answer for which nobody waits."""
    if isinstance(news, tuple):
        answer, fds = news
        infos = [info for info in answer.segments if info.mechanism != "file"]
        for info, fd in zip(infos, fds, strict=True):
            Segment.owning(info, fd).close()
