"""Movers: how the bytes of a record get from the agent of one node to that of another.

A record is cut into *parts*. The receiver asks the source for one part after the other, a few at a time, and writes each to its
place: what a mover gives at the source travels as the result of an actor's method, or as an object of the store, which is then
one object for all receivers of the part, for as long as one of them reads it. So nothing is left in the source's object store
when the receivers are lost, and a small store suffices for any record.

What another mover cannot do for a record, the object store can: see :mod:`shared_rpc.cluster.agreement`.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import xxhash

from shared_rpc.client.exported import RecordBytes, SegmentBytes
from shared_rpc.protocol.records import SegmentInfo

__all__ = [
    "LARGEST_PART",
    "OBJECTS",
    "DamagedPart",
    "Mover",
    "MoverFailed",
    "ObjectStoreMover",
    "Part",
    "part_nbytes",
    "parts_of",
    "smaller",
]

#: The name of the object store as a mover.
OBJECTS = "objects"

#: Bytes of a part at most. Whole megabytes, as a part costs Ray some milliseconds: with 8 MiB 64 MiB took half as long again;
#: and few, so that one is written while others travel, in memory of the store that is mapped already.
LARGEST_PART = 16 << 20
#: Of a node's object store, one part takes a share of at most one in so many: two receivers have three parts each, and a node
#: that relays has three parts of its own there.
_SHARE = 10
#: Bytes of a part at least.
_SMALLEST_PART = 1 << 20


class DamagedPart(Exception):
    """A part whose bytes are not those that the source has sent."""


class MoverFailed(Exception):
    """End of a mover's way for a record, for a reason that another one need not share: that goes on with what is missing."""


class Part(NamedTuple):
    """A piece of a record: bytes of one of its segments."""

    segment: int
    offset: int
    nbytes: int


def part_nbytes(store_nbytes: int) -> int:
    """Return how large parts may be that go through an object store of this size."""
    return max(_SMALLEST_PART, min(LARGEST_PART, store_nbytes // _SHARE))


def parts_of(segments: Sequence[SegmentInfo], nbytes: int) -> list[Part]:
    """Cut segments into parts of so many bytes, and what is left."""
    return [
        Part(number, offset, min(nbytes, info.nbytes - offset))
        for number, info in enumerate(segments)
        for offset in range(0, info.nbytes, nbytes)
    ]


def smaller(parts: Iterable[Part], nbytes: int) -> list[Part]:
    """Cut parts that have more than so many bytes."""
    return [
        Part(part.segment, offset, min(nbytes, part.offset + part.nbytes - offset))
        for part in parts
        for offset in range(part.offset, part.offset + part.nbytes, nbytes)
    ]


class Mover(ABC):
    """A way for the bytes of parts. Either end of a transfer has an object of its own, which is closed with the transfer.

    Methods are called in threads: :meth:`give` several times at once, :meth:`take` one after the other.
    """

    #: Whether what is given is as good for one receiver as for another: it goes through the object store, once.
    shared = False

    @abstractmethod
    def give(self, record: RecordBytes, part: Part) -> Any:
        """Return what travels for a part of an exported record.

        :raises MoverFailed: if this mover cannot move the record.
        """

    @abstractmethod
    def take(self, given: Any, room: RecordBytes, part: Part) -> None:
        """Write a part to its place in a room.

        :raises DamagedPart: if its digest does not fit.
        :raises MoverFailed: if this mover cannot move the record.
        """

    def close(self) -> None:  # noqa: B027  # most keep nothing
        """End what is under way: nothing reads or writes the records' memory by it any more when this returns."""

    @staticmethod
    def part_nbytes(store_nbytes: int) -> int:
        """Return how many bytes a part has at most, where the smaller one of two object stores has this size."""
        return part_nbytes(store_nbytes)


class _Bytes:
    """Bytes that Ray takes as they are: it copies them once, into the object store, and the receiver reads them there."""

    def __init__(self, data: Any) -> None:
        self.data = memoryview(data)

    def __reduce__(self) -> tuple[type[_Bytes], tuple[pickle.PickleBuffer]]:
        return _Bytes, (pickle.PickleBuffer(self.data),)


class _Digested(NamedTuple):
    """A part on its way, with the digest of what was sent."""

    digest: bytes
    bytes: _Bytes


class ObjectStoreMover(Mover):
    """Ray's object store, which there is everywhere."""

    shared = True

    def give(self, record: RecordBytes, part: Part) -> _Digested:
        """Return the bytes of a part, and their digest."""
        data = _host_bytes(record.segments[part.segment], part)
        return _Digested(xxhash.xxh3_128_digest(data), _Bytes(data))

    def take(self, given: _Digested, room: RecordBytes, part: Part) -> None:
        """Check and copy the bytes of a part."""
        data = given.bytes.data
        if len(data) != part.nbytes or xxhash.xxh3_128_digest(data) != given.digest:
            raise DamagedPart(
                f"{part.nbytes} bytes at {part.offset} of segment {part.segment} arrived as {len(data)} bytes of another digest"
            )
        _write(room.segments[part.segment], part, data)


def _host_bytes(segment: SegmentBytes, part: Part) -> Any:
    """Return the bytes of a part as a buffer, which is a copy for the memory of a GPU."""
    if segment.info.device == "cpu":
        return segment.buffer()[part.offset : part.offset + part.nbytes]
    return segment.tensor()[part.offset : part.offset + part.nbytes].cpu().numpy()


def _write(segment: SegmentBytes, part: Part, data: memoryview) -> None:
    if segment.info.device == "cpu":
        segment.write(part.offset, data)
        return
    import torch

    segment.tensor()[part.offset : part.offset + part.nbytes].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
