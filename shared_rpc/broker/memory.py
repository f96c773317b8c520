"""Memory for buffers and restored objects: the host's is the broker's own, a GPU's is asked of a worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from shared_rpc.broker.copying import CopyRequests
from shared_rpc.broker.worker import Worker
from shared_rpc.errors import CapabilityError, WorkerCrashed
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.execution.freeing import wait_for_room
from shared_rpc.memory.copies import CopyOrder, Steps, Written
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.records import EXPORTER_OWNED
from shared_rpc.protocol.specs import DeviceSpec

__all__ = ["MemoryRequests", "RelayedMemory"]

#: Seconds for a worker's answer to a request for memory.
_PATIENCE = 30.0


class MemoryRequests:
    """Requests for memory to workers. On the loop, but for :meth:`ask`.

    :param workers: returns the workers that may be asked.
    :param bare: returns a worker without the app, for where none of them can.
    """

    def __init__(self, workers: Callable[[], list[Worker]], bare: Callable[[], Awaitable[Worker]]) -> None:
        self._workers = workers
        self._bare = bare
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self.copies = CopyRequests(workers, bare)
        self._asked: dict[int, tuple[Worker, asyncio.Future[tuple[w.Allocated, list[int]]]]] = {}

    def ask(self, message: Message) -> tuple[w.Allocated, list[int]]:
        """Return a worker's answer, and the descriptors that came with it; from another thread.

        One that ends before it answers leaves nothing behind, so another one is asked, once.

        :raises CapabilityError: if the worker refuses.
        :raises WorkerCrashed: if none can start, or the second one ends too, or none answers in time; or if none runs that
            could be asked for a mere fact.
        """
        asked = asyncio.run_coroutine_threadsafe(asyncio.wait_for(self._ask(message), _PATIENCE), self._loop)
        try:
            answer, fds = asked.result()
        except TimeoutError:
            raise WorkerCrashed(f"no worker answered a request for memory within {_PATIENCE:g} s") from None
        if answer.error:
            raise CapabilityError(answer.error)
        return answer, fds

    async def _ask(self, message: Message) -> tuple[w.Allocated, list[int]]:
        try:
            return await self._ask_one(message)
        except WorkerCrashed:
            return await self._ask_one(message)

    async def _ask_one(self, message: Message) -> tuple[w.Allocated, list[int]]:
        able = [worker for worker in self._workers() if worker.served]
        worker = min(able, key=lambda worker: worker.congested, default=None)
        if worker is None:
            if isinstance(message, w.FreeBytes):
                raise WorkerCrashed("no worker runs that could be asked for free memory")
            worker = await self._bare()
        number = next(self._numbers)
        future: asyncio.Future[tuple[w.Allocated, list[int]]] = self._loop.create_future()
        self._asked[number] = worker, future
        worker.begin_order()
        try:
            worker.send(message, number)
            return await future
        finally:
            worker.end_order()
            del self._asked[number]

    def answered(self, worker: Worker, message: w.Allocated, frame: Frame) -> None:
        """Take in an answer; its descriptors stay the frame's if nothing waits for it any more."""
        worker.keeps_memory |= message.segment is not None and message.segment.mechanism in EXPORTER_OWNED
        _, future = self._asked.get(frame.request_id, (None, None))
        if future is not None and not future.done():
            future.set_result((message, frame.detach_fds()))

    def lost(self, worker: Worker) -> None:
        """Fail the requests to a worker that has ended."""
        self.copies.lost(worker)
        for asked, future in tuple(self._asked.values()):
            if asked is worker and not future.done():
                future.set_exception(WorkerCrashed(f"the worker (pid {worker.pid}) ended during a request for memory"))


class RelayedMemory(DeviceMemory):
    """The memory of one provider's devices: the host's is made here, a GPU's by a worker."""

    def __init__(self, requests: MemoryRequests, devices: Sequence[DeviceSpec]) -> None:
        super().__init__("cpu")
        self._requests = requests
        self._facts = {device.id: device for device in devices}

    def devices(self) -> tuple[str, ...]:
        """Return the ids of the devices that the workers have reported."""
        return tuple(self._facts)

    def facts(self, device: str) -> DeviceSpec:
        """Return the workers' report of a device."""
        return self._facts[device]

    def free(self, device: str) -> int | None:
        """Return the free bytes of a device, None while no worker can be asked."""
        if device == "cpu":
            return super().free(device)
        try:
            return self._requests.ask(w.FreeBytes(device))[0].free
        except WorkerCrashed:
            return None

    def allocate(self, device: str, nbytes: int) -> Segment:
        """Make zeroed memory, here or in a worker."""
        if device == "cpu":
            return super().allocate(device, nbytes)
        wait_for_room()
        answer, fds = self._requests.ask(w.Allocate(device, nbytes))
        assert answer.segment is not None, "an answer without an error has a segment"
        return Segment.owning(answer.segment, fds[0])

    def _copy_of_gpus(self, orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
        """Have a worker make the segments that a GPU's driver has to do with."""
        return self._requests.copies.copy(orders, steps)

    def _forget(self, copy_id: str) -> None:
        """Have the worker that made a copy unmap it."""
        self._requests.copies.forget(copy_id)
