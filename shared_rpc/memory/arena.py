"""How blocks of bytes are laid out in segments. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ALIGNMENT", "SEGMENT_LIMIT", "Place", "pack"]

#: Bytes. What torch's CUDA allocator aligns to, so that vectorised kernels behave as they do on its tensors.
ALIGNMENT = 512

#: Bytes. Few large segments attach quickly (one import and one map each); 1 GiB bounds what a move needs at a time.
SEGMENT_LIMIT = 1 << 30


class Place(NamedTuple):
    """Where a block lies: the index of its segment and its offset in bytes."""

    segment: int
    offset: int


def pack(sizes: Sequence[int], *, limit: int = SEGMENT_LIMIT, alignment: int = ALIGNMENT) -> tuple[list[int], list[Place]]:
    """Lay blocks of ``sizes`` bytes out in order: ``(bytes of each segment, place of each block)``.

    A segment takes blocks until the next one would carry it over ``limit``; a block larger than ``limit`` has a
    segment of its own.
    """
    segments: list[int] = []
    places: list[Place] = []
    for size in sizes:
        offset = -(-segments[-1] // alignment) * alignment if segments else 0
        if not segments or offset + size > limit:
            segments.append(0)
            offset = 0
        places.append(Place(len(segments) - 1, offset))
        segments[-1] = offset + size
    return segments, places
