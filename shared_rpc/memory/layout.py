"""Layout of blocks of bytes in segments. Pure arithmetic."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

#: Bytes. The alignment of torch's CUDA allocator, so that vectorised kernels behave as on its tensors.
ALIGNMENT = 512

#: Bytes. Few large segments attach quickly (one import and one map each); 1 GiB bounds the memory of a move.
SEGMENT_LIMIT = 1 << 30


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


class Place(NamedTuple):
    """The place of a block: the index of its segment and its offset in bytes."""

    segment: int
    offset: int


def pack(sizes: Sequence[int], *, limit: int = SEGMENT_LIMIT, alignment: int = ALIGNMENT) -> tuple[list[int], list[Place]]:
    """Lay out blocks of ``sizes`` bytes in order: ``(bytes of each segment, place of each block)``.

    A segment takes blocks until the next one would exceed ``limit``; a block larger than ``limit`` gets a
    segment of its own.
    """
    segments: list[int] = []
    places: list[Place] = []
    for size in sizes:
        offset = aligned(segments[-1], alignment) if segments else 0
        if not segments or offset + size > limit:
            segments.append(0)
            offset = 0
        places.append(Place(len(segments) - 1, offset))
        segments[-1] = offset + size
    return segments, places


class Extents:
    """Free bytes of a segment. Allocation is first-fit; released extents are merged with their neighbours."""

    def __init__(self, nbytes: int) -> None:
        #: The offset and the bytes of each free extent, in order.
        self.free = [(0, nbytes)]

    def acquire(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` newly acquired bytes, None without a sufficient extent."""
        for index, (offset, size) in enumerate(self.free):
            if size >= nbytes:
                self.free[index : index + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                return offset
        return None

    def release(self, offset: int, nbytes: int) -> None:
        """Release acquired bytes."""
        free = self.free
        start = end = bisect.bisect(free, (offset, 0))
        if end < len(free) and free[end][0] == offset + nbytes:
            nbytes += free[end][1]
            end += 1
        if start and sum(free[start - 1]) == offset:
            start -= 1
            offset, nbytes = free[start][0], free[start][1] + nbytes
        free[start:end] = [(offset, nbytes)]
