"""Copies that a broker orders by a message: a worker makes them with its GPU's driver, or a client that has offered it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shared_rpc.errors import CapabilityError, SharedRPCError, to_wire
from shared_rpc.memory.copies import CopyCancelled, CopyOrder, Steps
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment, gpu_support
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.records import SegmentInfo

if TYPE_CHECKING:
    from shared_rpc.memory.gpu_copies import GpuCopies

__all__ = ["answered", "load_gpu_copies", "ordered", "refusal"]


def load_gpu_copies() -> GpuCopies:
    """Return new copies that this process makes with a GPU's driver.

    :raises CapabilityError: if the bindings of the driver are not installed.
    """
    with gpu_support("copying a GPU's memory"):
        from shared_rpc.memory.gpu_copies import GpuCopies

    return GpuCopies()


def ordered(message: w.CopySegments, fds: list[int]) -> list[CopyOrder]:
    """Return what is ordered; the segments own the descriptors."""
    left = iter(fds)

    def owned(info: SegmentInfo) -> Segment:
        return Segment.owning(info, next(left))

    sources = [owned(info) for info in message.sources]
    targets = [owned(info) if number in message.targets else None for number, info in enumerate(message.wanted)]
    return [CopyOrder(*parts) for parts in zip(sources, message.wanted, message.digests, targets, strict=True)]


def answered(
    copies: Callable[[], GpuCopies], orders: Sequence[CopyOrder], steps: Steps
) -> tuple[w.SegmentsCopied, list[Segment]]:
    """Make the ordered segments, and close the orders'; return the answer, and the new segments, which go with it."""
    try:
        # A safe point: memory dropped to make room is returned to the device before more is allocated.
        MAPPINGS.drain()
        made = copies().copy(orders, steps)
    except CopyCancelled:
        return w.SegmentsCopied([], [], stopped=True), []
    except Exception as error:
        return refusal(error), []
    finally:
        for order in orders:
            order.source.close()
            if order.target is not None:
                order.target.close()
    answer = w.SegmentsCopied([one.segment.info for one in made], [one.digest for one in made])
    new: list[Segment] = []
    for order, one in zip(orders, made, strict=True):
        if order.target is None:
            new.append(one.segment)
        else:
            one.segment.close()
    return answer, new


def refusal(error: Exception) -> w.SegmentsCopied:
    """Return the answer to orders of which nothing was made."""
    known = error if isinstance(error, SharedRPCError) else CapabilityError(f"{type(error).__name__}: {error}")
    code, text, detail = to_wire(known)
    return w.SegmentsCopied([], [], code, text, detail)
