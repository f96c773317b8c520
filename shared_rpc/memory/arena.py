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
        self.nbytes = nbytes
        self.free = nbytes
        #: Offsets of free extents, in order, and the bytes of each.
        self._offsets = [0]
        self._sizes = {0: nbytes}

    def acquire(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` newly acquired bytes, None without a sufficient extent."""
        for index, offset in enumerate(self._offsets):
            left = self._sizes[offset] - nbytes
            if left < 0:
                continue
            del self._sizes[offset]
            if left:
                self._offsets[index] = offset + nbytes
                self._sizes[offset + nbytes] = left
            else:
                del self._offsets[index]
            self.free -= nbytes
            return offset
        return None

    def release(self, offset: int, nbytes: int) -> None:
        """Release acquired bytes."""
        offsets, sizes = self._offsets, self._sizes
        index = bisect.bisect(offsets, offset)
        end = offset + nbytes
        joins_next = index < len(offsets) and offsets[index] == end
        before = offsets[index - 1] if index else -1
        # No call from here on, after which a signal handler could raise: other threads continue with the free extents.
        self.free += nbytes
        if joins_next:
            nbytes += sizes[end]
            del sizes[end], offsets[index]
        if index and before + sizes[before] == offset:
            sizes[before] += nbytes
        else:
            offsets[index:index] = [offset]
            sizes[offset] = nbytes
