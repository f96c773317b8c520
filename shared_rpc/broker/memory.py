"""Memory of a broker's devices: the host's is allocated and copied in this process, a GPU's by workers that have its driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from shared_rpc.broker.supervisor import Supervisor
from shared_rpc.broker.worker import Worker
from shared_rpc.errors import WorkerCrashed
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.memory.copies import CopyOrder, Steps, Written, closing_all, on_host
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import close_all
from shared_rpc.protocol.records import EXPORTER_OWNED
from shared_rpc.protocol.specs import DeviceSpec

#: Seconds to wait for a worker's answer to a request for memory.
_PATIENCE = 30.0
#: Maximum seconds between two steps of a copy in a worker. The steps of a slow disk are the longest.
_STEP_PATIENCE = 60.0
#: Maximum segments per request: their descriptors, and those of as many targets, fit into one frame.
_SEGMENTS = 256


class RelayedMemory(DeviceMemory):
    """The memory of one provider's devices. The host's is allocated and copied here, a GPU's by a worker.

    On the broker's loop, apart from :meth:`forget`. A worker that ends before it answers leaves nothing behind, so the request
    is repeated once with another one.

    :param devices: as reported by the workers.
    :param supervisor: its workers are asked, and one without the app as a fallback.
    """

    def __init__(self, devices: Sequence[DeviceSpec], supervisor: Supervisor) -> None:
        super().__init__("cpu")
        self._specs = list(devices)
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()

    async def _devices(self) -> list[DeviceSpec]:
        return self._specs

    async def free(self, device: str) -> int | None:
        """Return the free bytes of a device, None while no worker is available."""
        if device == "cpu":
            return await super().free(device)
        worker = self._choose({device})
        if worker is None:
            return None
        try:
            return (await self._ask(worker, w.FreeBytes(device), 0))[0].free
        except WorkerCrashed:
            return None

    async def _created(self, device: str, nbytes: int) -> Segment:
        """Allocate zeroed memory, here or in a worker.

        :raises CapabilityError: if the worker refuses.
        :raises WorkerCrashed: if none can start, or the second one ends or does not answer either.
        """
        if device == "cpu":
            return await super()._created(device, nbytes)
        message = w.Allocate(device, nbytes)
        worker = await self._able({device})
        try:
            answer, fds = await self._ask(worker, message, 1)
        except WorkerCrashed:
            worker = await self._able({device}, worker)
            answer, fds = await self._ask(worker, message, 1)
        assert answer.segment is not None, "an answer without an error has a segment"
        segment = Segment.owning(answer.segment, fds[0])
        if segment.info.mechanism in EXPORTER_OWNED:
            worker.memory.add(segment.owner)
        return segment

    async def _ask(self, worker: Worker, message: w.Allocate | w.FreeBytes, new: int) -> tuple[w.Allocated, list[int]]:
        """Send a request to a worker; return its answer, and the ``new`` descriptors of the answer's frame.

        :raises WorkerCrashed: if there are too few descriptors, or too many.
        """
        async with _patience(worker, _PATIENCE, "has not answered a request for memory"):
            answer, fds = await worker.requests.request(message)
        if len(fds) != new:
            close_all(fds)
            raise WorkerCrashed(
                f"the worker (pid {worker.pid}) returned an invalid answer to a request for memory: {len(fds)} descriptors "
                f"instead of {new}"
            )
        return answer, fds

    async def _copied_on_gpus(self, orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
        """Have workers make the segments that need a GPU driver. On cancellation the worker stops, and the segments made are
        closed.

        :raises SharedRPCError: that of the worker.
        :raises WorkerCrashed: if the second worker ends, stalls or returns an invalid answer too, or none can start.
        """
        made: list[Written] = []
        with closing_all(made):
            for start in range(0, len(orders), _SEGMENTS):
                some, attempts = orders[start : start + _SEGMENTS], _Attempts(steps)
                try:
                    made += await self._copied(some, attempts)
                except WorkerCrashed:
                    made += await self._copied([_for_retry(order) for order in some], attempts)
        return made

    async def _copied(self, orders: Sequence[CopyOrder], attempts: _Attempts) -> list[Written]:
        sources = [order.source for order in orders]
        targets = {number: order.target for number, order in enumerate(orders) if order.target is not None}
        message = w.CopySegments(
            [source.info for source in sources],
            [order.digest for order in orders],
            [order.wanted for order in orders],
            list(targets),
        )
        devices = {info.device for info in (*message.sources, *message.wanted)} - {"cpu"}
        worker = attempts.worker = await self._able(devices, attempts.worker)
        async with _patience(worker, _STEP_PATIENCE, "has copied nothing") as patience:

            def report(news: w.CopyProgress) -> None:
                if not patience.expired():
                    patience.reschedule(self._loop.time() + _STEP_PATIENCE)
                attempts.progressed(news.done)

            # No variable keeps the owners of descriptors: the frames of an error may outlive the segments.
            answer, received = await worker.requests.request(
                message,
                tuple([segment.owner for segment in (*sources, *targets.values())]),
                progressed=report,
                unused=lambda answer: self._forget([info.id for info in answer.segments]),
            )
        return self._written(orders, answer, received, worker.pid)

    async def _able(self, devices: set[str], failed: Worker | None = None) -> Worker:
        """Return a worker as in :meth:`_choose`, or else the one without the app."""
        return self._choose(devices, failed) or await self._supervisor.bare()

    def _choose(self, devices: set[str], failed: Worker | None = None) -> Worker | None:
        """Choose the first worker that sees the devices and reads: it probably has the host memory mapped.

        :param failed: the worker of an earlier attempt, which is excluded.
        """
        able = [
            worker
            for worker in self._supervisor.workers
            if worker is not failed
            and worker.served
            and devices <= {each.id for serve in worker.served.values() for each in serve.devices}
        ]
        return min(able, key=lambda worker: worker.congested, default=None)

    def _written(self, orders: Sequence[CopyOrder], answer: w.SegmentsCopied, received: list[int], pid: int) -> list[Written]:
        """Return the segments made by a worker, which own the received descriptors.

        :raises WorkerCrashed: if segments, digests or descriptors are missing or superfluous; the descriptors are closed then.
        """
        new = sum(order.target is None for order in orders)
        if not len(orders) == len(answer.segments) == len(answer.digests) or len(received) != new:
            problem = (
                f"the worker (pid {pid}) returned an invalid answer to a request for {len(orders)} copies: "
                f"{len(answer.segments)} segments, {len(answer.digests)} digests, {len(received)} descriptors instead of {new}"
            )
            close_all(received)
            raise WorkerCrashed(problem)
        left = iter(received)
        return [
            Written(order.target.duplicate() if order.target is not None else Segment.owning(info, next(left)), digest)
            for order, info, digest in zip(orders, answer.segments, answer.digests, strict=True)
        ]

    def forget(self, copies: Sequence[str]) -> None:
        """Have the workers unmap host memory whose copies were closed; from any thread, without blocking."""
        with suppress(RuntimeError):  # the loop is closed: the workers end too
            self._loop.call_soon_threadsafe(self._forget, copies)

    def _forget(self, copies: Sequence[str]) -> None:
        for worker in self._supervisor.all:
            worker.send(w.ForgetCopies([*copies]))


class _Attempts:
    """Attempts to make segments: the last worker used, and the progress, which is reported without repetition."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._done = 0
        self.worker: Worker | None = None

    def progressed(self, done: int) -> None:
        """Count the bytes that are copied for the first time."""
        if done > self._done:
            more, self._done = done - self._done, done
            self._steps.count(more)


def _for_retry(order: CopyOrder) -> CopyOrder:
    """Return an order for a new attempt, without the earlier host memory, which may still be written to."""
    if order.target is None or order.target.info.mechanism == "file":
        return order
    return CopyOrder(order.source, on_host(order.source.info))


@asynccontextmanager
async def _patience(worker: Worker, seconds: float, problem: str) -> AsyncIterator[asyncio.Timeout]:
    """Limit the wait for a worker. A stuck one without the app is killed, so that the next request gets a new one; a worker of
    the app may have runs.

    :raises WorkerCrashed: with the problem after ``seconds``.
    """
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield timeout
    except TimeoutError:
        if worker.bare:
            worker.kill("it made no progress")
        raise WorkerCrashed(f"the worker (pid {worker.pid}) {problem} for {seconds:g} s") from None
