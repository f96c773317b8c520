"""Movers: how the bytes of a record get from the agent of one node to that of another.

A record is cut into *parts*. The receiver asks the source for one part after the other, a few at a time, and writes each to its
place: what a mover gives at the source travels as the result of an actor's method, which the receiver owns. So nothing is left
in the source's object store when the receiver is lost, and the other way round; and a small store suffices for any record.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import xxhash

from shared_rpc.client.exported import RecordBytes, SegmentBytes
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.records import SegmentInfo

__all__ = ["LARGEST_PART", "DamagedPart", "Mover", "ObjectStoreMover", "Part", "mover_of", "part_nbytes", "parts_of"]

#: Bytes of a part at most. Whole megabytes, as a part costs Ray some milliseconds: with 8 MiB 64 MiB took half as long again;
#: and few, so that one is written while others travel, in memory of the store that is mapped already.
LARGEST_PART = 16 << 20
#: Of a node's object store, one part takes a share of at most one in so many: two receivers have three parts each.
_SHARE = 8
#: Bytes of a part at least.
_SMALLEST_PART = 1 << 20


class DamagedPart(Exception):
    """A part whose bytes are not those that the source has sent."""


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


class Mover(Protocol):
    """A way for the bytes of parts. Its methods are called in threads, several at once."""

    def give(self, record: RecordBytes, part: Part) -> Any:
        """Return what travels for a part of an exported record."""

    def take(self, given: Any, room: RecordBytes, part: Part) -> None:
        """Write a part to its place in a room.

        :raises DamagedPart: if its digest does not fit.
        """


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


class ObjectStoreMover:
    """Ray's object store, which there is everywhere."""

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


#: The movers that have a name.
_MOVERS: dict[str, type[Mover]] = {"objects": ObjectStoreMover}


def mover_of(name: str) -> type[Mover]:
    """Return the class of a mover: by the name of one of this module's, or ``module:class``.

    :raises ConfigurationError: if there is none.
    """
    if name in _MOVERS:
        return _MOVERS[name]
    module, colon, kind = name.partition(":")
    if not colon:
        raise ConfigurationError(f"SHARED_TENSOR_CLUSTER_MOVER={name!r}: use {', '.join(_MOVERS)}, or module:class")
    try:
        found: type[Mover] = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"SHARED_TENSOR_CLUSTER_MOVER={name!r} cannot be loaded: {error}") from error
    return found
