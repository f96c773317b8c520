"""Memory of a server for buffers and for copies of objects between tiers; and waiting for pending frees."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from shared_rpc.errors import CapabilityError
from shared_rpc.execution.threads import WorkerThreads
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.closing import CLOSER
from shared_rpc.memory.copies import (
    ON_HOST,
    CopyOrder,
    LowerCopy,
    Progress,
    Steps,
    Written,
    close_written,
    closing_all,
    copy_on_host,
    ignore_progress,
    on_host,
)
from shared_rpc.memory.devices import devices_of, facts_of, free_bytes
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment, gpu_support
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.protocol.records import SegmentInfo, Tier
from shared_rpc.protocol.specs import DeviceSpec

if TYPE_CHECKING:
    from shared_rpc.memory.gpu_copies import GpuCopies

#: Threads that call drivers, one request each: restoring an object does not wait for the eviction of another.
_THREADS = 4
_UNMAPPING = "shared-rpc-unmapping"
#: Optional copies leave one part in this many of the host's memory free.
_SPARE = 4


class DeviceMemory:
    """The devices of a server, whose memory this process allocates and copies; on a GPU that needs no CUDA context.

    On the server's loop. Driver calls may block, so they run in threads.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._threads = WorkerThreads(_THREADS)
        #: Ids of copies whose mappings are removed when the copies end.
        self._watched: set[str] = set()

    def close(self) -> None:
        """End the threads, after the loop has ended."""
        self._threads.close()

    async def device(self, name: str) -> DeviceSpec:
        """Describe a device of the server.

        :raises CapabilityError: if the server has no such device.
        """
        devices = {device.id: device for device in await self._devices()}
        if name not in devices:
            raise CapabilityError(f"this server allocates no memory on {name[:100]}: use one of {', '.join(devices)}")
        return devices[name]

    async def devices(self) -> list[tuple[DeviceSpec, int | None]]:
        """Return all devices, each with its free bytes (None if unknown)."""
        devices = await self._devices()
        return list(zip(devices, await asyncio.gather(*[self.free(device.id) for device in devices]), strict=True))

    async def _devices(self) -> list[DeviceSpec]:
        return await self._threads.run(lambda: [facts_of(device) for device in devices_of(self._device)])

    async def free(self, device: str) -> int | None:
        """Return the free bytes of a device, None if unknown."""
        return await self._threads.run(lambda: free_bytes(device))

    @property
    def host_free(self) -> int | None:
        """The free bytes of the host, None if unknown."""
        return free_bytes("cpu")

    @property
    def host_is_short(self) -> bool:
        """True if less than a quarter of the host's memory is available."""
        free = self.host_free
        return free is not None and free < facts_of("cpu").total // _SPARE

    async def allocate(self, device: str, nbytes: int) -> Segment:
        """Allocate zeroed memory.

        :raises CapabilityError: if the device has too little.
        """
        if frees_are_pending():
            await until_freed()
        return await self._created(device, nbytes)

    async def _created(self, device: str, nbytes: int) -> Segment:
        def create() -> Segment:
            # A safe point: dropped memory is returned to the device before more is allocated.
            MAPPINGS.drain()
            return backend_for(device).create(nbytes)

        return await self._threads.run(create, Segment.close)

    async def lower(
        self,
        segments: Sequence[Segment],
        to: Tier,
        spill: SpillDirectory | None = None,
        progress: Progress = ignore_progress,
        into: Mapping[str, Segment] = MappingProxyType({}),
    ) -> list[LowerCopy]:
        """Copy the bytes of an object to a lower tier; its segments are borrowed, and may be copies in host memory themselves.

        A segment in host memory is its own copy there, by the same descriptor.

        :param to: ``"host"`` or ``"file"``.
        :param spill: the directory for files.
        :param progress: called with the copied and the total bytes, in any thread.
        :param into: host memory to reuse instead of new memory, by the id of the segment whose bytes it held. It is borrowed,
            and may still be written to after an error or a cancellation.
        :raises CapabilityError: if there is too little memory, or no spill directory.
        :raises WorkerCrashed: if the worker that copied has ended; its copies are discarded.
        """
        orders: list[CopyOrder] = []
        try:
            for segment in segments:
                if to == "file":
                    if spill is None:
                        raise CapabilityError(
                            "objects cannot be moved to files, because the server has no directory for them: start it with "
                            "--spill-dir"
                        )
                    target = spill.create(segment.info.nbytes)
                    orders.append(CopyOrder(segment, target.info, target=target))
                elif (host := into.get(segment.info.id)) is not None:
                    orders.append(CopyOrder(segment, host.info, target=host.duplicate()))
                else:
                    orders.append(CopyOrder(segment, on_host(segment.info)))
            made = await self.copy(orders, progress)
            return [LowerCopy(segment, to, digest) for segment, digest in made]
        finally:
            for order in orders:
                if order.target is not None:
                    order.target.close()

    async def raise_(
        self, copies: Sequence[LowerCopy], infos: Sequence[SegmentInfo], progress: Progress = ignore_progress
    ) -> list[Segment]:
        """Make segments from copies, which are kept: on their devices, or in host memory for files.

        :param infos: descriptions of the segments to make, in the order of the copies.
        :param progress: as in :meth:`lower`.
        :raises CapabilityError: if the device has not enough memory.
        :raises RecordError: with reason ``"damaged"`` if a file differs from the written bytes, or ``"unreadable"``.
        :raises WorkerCrashed: as :meth:`lower`.
        """
        if frees_are_pending():
            await until_freed()
        orders = [CopyOrder(copy.segment, info, copy.digest) for copy, info in zip(copies, infos, strict=True)]
        return [segment for segment, _ in await self.copy(orders, progress)]

    async def copy(self, orders: Sequence[CopyOrder], progress: Progress = ignore_progress) -> list[Written]:
        """Carry out the orders and return their segments in order; the caller owns them.

        On cancellation the copying stops at its next step, and the segments made so far are closed.
        """
        there = [order for order in orders if _is_own_copy(order)]
        here = [order for order in orders if order not in there and _is_of_host(order)]
        away = [order for order in orders if order not in there and order not in here]
        stop = threading.Event()
        steps = Steps(sum(order.wanted.nbytes for order in (*here, *away)), progress, stop.is_set)
        made: dict[int, Written] = {}
        try:
            with closing_all(made.values()):
                for order in there:
                    made[id(order)] = Written(Segment(order.wanted, order.source.owner), b"")
                if here:
                    copies = await self._in_thread(copy_on_host, here, steps)
                    made.update(zip(map(id, here), copies, strict=True))
                if away:
                    made.update(zip(map(id, away), await self._copied_on_gpus(away, steps), strict=True))
                    for order in away:
                        self._watch(order, made[id(order)].segment)
        except asyncio.CancelledError:
            stop.set()
            raise
        return [made[id(order)] for order in orders]

    async def _copied_on_gpus(self, orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
        """Make the segments that need a GPU driver."""

        def copy(orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
            # A safe point, see allocate().
            MAPPINGS.drain()
            return self.gpu_copies.copy(orders, steps)

        return await self._in_thread(copy, orders, steps)

    async def _in_thread(
        self, copy: Callable[[Sequence[CopyOrder], Steps], list[Written]], orders: Sequence[CopyOrder], steps: Steps
    ) -> list[Written]:
        """Copy in a thread that has its own descriptors: after a cancellation it continues until its next step."""
        own = [order.duplicate() for order in orders]

        def close() -> None:
            for order in own:
                order.close()

        def work() -> list[Written]:
            try:
                return copy(own, steps)
            finally:
                close()

        return await self._threads.run(work, close_written, skipped=close)

    @functools.cached_property
    def gpu_copies(self) -> GpuCopies:
        """The copies that this process makes with a GPU driver."""
        with gpu_support("copying a GPU's memory"):
            from shared_rpc.memory.gpu_copies import GpuCopies

        return GpuCopies()

    def _watch(self, order: CopyOrder, made: Segment) -> None:
        """Unmap the copy's host memory once its last descriptor in this process is closed."""
        for segment in (order.source, made):
            info, descriptor = segment.info, segment.descriptor
            if info.mechanism in ("host_vmm", "memfd") and info.id not in self._watched and descriptor is not None:
                self._watched.add(info.id)
                FINALIZER.start()
                weakref.finalize(descriptor, FINALIZER.submit, functools.partial(self._end_watch, info.id)).atexit = False

    def _end_watch(self, copy_id: str) -> None:
        self._watched.discard(copy_id)
        self.forget([copy_id])

    def forget(self, copies: Sequence[str]) -> None:
        """Unmap host memory of ended copies in a separate thread, because unmapping takes as long as mapping."""
        if copies and "gpu_copies" in vars(self):  # otherwise nothing was ever mapped
            with suppress(RuntimeError):  # the interpreter ends
                threading.Thread(target=self.gpu_copies.forget, args=(copies,), name=_UNMAPPING, daemon=True).start()


def _is_own_copy(order: CopyOrder) -> bool:
    """Return True if the memory is the object's own host memory, which needs no copy."""
    return (order.source.info.device, order.source.info.mechanism) == (order.wanted.device, order.wanted.mechanism) and (
        order.wanted.mechanism in ("memfd", "host_vmm")
    )


def _is_of_host(order: CopyOrder) -> bool:
    return {order.source.info.mechanism, order.wanted.mechanism} <= ON_HOST


def frees_are_pending() -> bool:
    """Return True if an allocation may fail because frees are pending: any free of a GPU's memory, which is allocated as a
    whole, or more of the host's than is free.
    """
    if not CLOSER:
        return False
    left = dict(CLOSER.left())
    on_host = left.pop("cpu", 0)
    return bool(left) or on_host > (free_bytes("cpu") or 0)


async def until_freed() -> None:
    """Wait until all memory dropped so far is free. The only place where a request waits for frees."""
    if not CLOSER:
        return
    loop, freed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(freed.set)

    CLOSER.notify(wake)
    await freed.wait()
