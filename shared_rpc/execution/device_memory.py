"""The memory that a server makes buffers of, and to which it takes the bytes of objects."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from shared_rpc.errors import CapabilityError
from shared_rpc.execution.freeing import wait_for_room
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.copies import (
    ON_HOST,
    Cancelled,
    CopyOrder,
    LowerCopy,
    Progress,
    Steps,
    Written,
    closing_all,
    copy_on_host,
    never,
    nobody,
    on_host,
)
from shared_rpc.memory.inventory import devices_of, facts_of, free_bytes
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment, gpu_support
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.protocol.records import SegmentInfo, Tier
from shared_rpc.protocol.specs import DeviceSpec

if TYPE_CHECKING:
    from shared_rpc.memory.gpu_copies import GpuCopies

__all__ = ["DeviceMemory"]

_UNMAPPING = "shared-rpc-unmapping"
#: One part in so many of the host's memory is left to others by what only saves time.
_SPARE = 4


class DeviceMemory:
    """The devices of a server, whose memory this process makes; on a GPU that needs no CUDA context.

    Everything here may wait for a driver and is called in a thread, except the host's free memory, which the loop asks for.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        #: Copies that are unmapped where they were mapped when they end, by their ids.
        self._watched: set[str] = set()

    def devices(self) -> tuple[str, ...]:
        """Return the ids of the devices."""
        return devices_of(self._device)

    def facts(self, device: str) -> DeviceSpec:
        """Return the constant facts of a device."""
        return facts_of(device)

    def free(self, device: str) -> int | None:
        """Return the free bytes of a device, None if they are not known."""
        return free_bytes(device)

    @property
    def host_is_short(self) -> bool:
        """Whether less than a quarter of the host's memory is available."""
        free = self.free("cpu")
        return free is not None and free < facts_of("cpu").total // _SPARE

    def allocate(self, device: str, nbytes: int) -> Segment:
        """Make zeroed memory.

        :raises CapabilityError: if the device has not enough.
        """
        # A safe point: memory dropped to make room is returned to the device before more is allocated.
        MAPPINGS.drain()
        wait_for_room()
        return backend_for(device).create(nbytes)

    def lower(
        self,
        segments: Sequence[Segment],
        to: Tier,
        spill: SpillDirectory | None = None,
        progress: Progress = nobody,
        cancelled: Cancelled = never,
        into: Mapping[str, Segment] = MappingProxyType({}),
    ) -> list[LowerCopy]:
        """Copy the bytes of an object to a lower tier; its segments are borrowed, and may be copies in host memory themselves.

        What is in host memory already is its own copy there, by the same descriptor.

        :param to: ``"host"`` or ``"file"``.
        :param spill: where files are made.
        :param progress: called in this thread with how many bytes of how many are copied.
        :param cancelled: asked in this thread whether the copies are not wanted any more.
        :param into: host memory that is written to in place of new one, by the id of the segment that it had the bytes of. It
            is borrowed, and after an error somebody may write to it still.
        :raises CapabilityError: if there is no room, or no spill directory.
        :raises WorkerCrashed: if the worker that copied has ended; nothing is left of its copies.
        :raises CopyCancelled: if they are not wanted any more; nothing is left.
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
            made = self._copied(orders, progress, cancelled)
            return [LowerCopy(segment, to, digest) for segment, digest in made]
        finally:
            for order in orders:
                if order.target is not None:
                    order.target.close()

    def raise_(
        self,
        copies: Sequence[LowerCopy],
        infos: Sequence[SegmentInfo],
        progress: Progress = nobody,
        cancelled: Cancelled = never,
    ) -> list[Segment]:
        """Make segments of copies, which stay as they are: on their devices, or in host memory of files.

        :param infos: what the segments are to be, in the order of the copies.
        :param progress: as in :meth:`lower`.
        :param cancelled: as in :meth:`lower`.
        :raises CapabilityError: if the device has not enough memory.
        :raises RecordError: with reason ``"damaged"`` if a file has not the bytes that were written, or ``"unreadable"``.
        :raises WorkerCrashed: as :meth:`lower`.
        :raises CopyCancelled: as :meth:`lower`.
        """
        # A safe point: memory dropped to make room is returned to the device before more is allocated.
        MAPPINGS.drain()
        wait_for_room()
        orders = [CopyOrder(copy.segment, info, copy.digest) for copy, info in zip(copies, infos, strict=True)]
        return [segment for segment, _ in self._copied(orders, progress, cancelled)]

    def _copied(self, orders: Sequence[CopyOrder], progress: Progress, cancelled: Cancelled) -> list[Written]:
        """Return the segments that were ordered, in their order; the caller owns them."""
        there = [order for order in orders if _is_there(order)]
        here = [order for order in orders if order not in there and _is_of_host(order)]
        away = [order for order in orders if order not in there and order not in here]
        steps = Steps(sum(order.wanted.nbytes for order in (*here, *away)), progress, cancelled)
        made: dict[int, Written] = {}
        with closing_all(made.values()):
            for order in there:
                made[id(order)] = Written(_as(order.source.duplicate(), order.wanted), b"")
            for some, copy in ((here, copy_on_host), (away, self._copy_of_gpus)):
                if some:
                    made.update(zip(map(id, some), copy(some, steps), strict=True))
            for order in away:
                self._watch(order, made[id(order)].segment)
        return [made[id(order)] for order in orders]

    def _copy_of_gpus(self, orders: Sequence[CopyOrder], steps: Steps) -> list[Written]:
        """Make the segments that a GPU's driver has to do with."""
        return self.gpu_copies.copy(orders, steps)

    @functools.cached_property
    def gpu_copies(self) -> GpuCopies:
        """The copies that this process makes with a GPU's driver."""
        with gpu_support("copying a GPU's memory"):
            from shared_rpc.memory.gpu_copies import GpuCopies

        return GpuCopies()

    def _watch(self, order: CopyOrder, made: Segment) -> None:
        """Have host memory unmapped where it was copied from or to, once its last descriptor in this process is closed."""
        for segment in (order.source, made):
            info, descriptor = segment.info, segment.descriptor
            if info.mechanism in ("host_vmm", "memfd") and info.id not in self._watched and descriptor is not None:
                self._watched.add(info.id)
                FINALIZER.start()
                weakref.finalize(descriptor, FINALIZER.submit, functools.partial(self._end_watch, info.id)).atexit = False

    def _end_watch(self, copy_id: str) -> None:
        self._watched.discard(copy_id)
        self._forget(copy_id)

    def _forget(self, copy_id: str) -> None:
        """Unmap host memory of a copy that is gone, in a thread of its own: it takes as long as it took to map it."""
        with suppress(RuntimeError):  # the interpreter ends
            threading.Thread(target=self.gpu_copies.forget, args=([copy_id],), name=_UNMAPPING, daemon=True).start()


def _is_there(order: CopyOrder) -> bool:
    """Return whether the memory is the one that is wanted: host memory of the object, which is its own copy."""
    return (order.source.info.device, order.source.info.mechanism) == (order.wanted.device, order.wanted.mechanism) and (
        order.wanted.mechanism in ("memfd", "host_vmm")
    )


def _is_of_host(order: CopyOrder) -> bool:
    return {order.source.info.mechanism, order.wanted.mechanism} <= ON_HOST


def _as(segment: Segment, info: SegmentInfo) -> Segment:
    segment.info = info
    return segment
