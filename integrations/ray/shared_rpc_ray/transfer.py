"""Transfer of a record from the agent of one node to those of others, through Ray's object store.

A record is cut into *parts*. Its holder puts a part into the store when the first receiver asks for it, and answers with the
reference and a digest; further receivers get the same reference, and Ray pulls the part from any node that has it. The holder
keeps the references of the last :data:`WINDOW` parts only, so a small store suffices for a record of any size.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ray
import xxhash

from shared_rpc.client.exported import AsyncExportedRecord, RecordBytes, SegmentBytes
from shared_rpc.protocol.records import SegmentInfo

__all__ = ["Part", "Sending", "in_turn", "part_nbytes", "parts_of", "take"]

#: Bytes of a part at most. A part costs Ray some milliseconds; while one is written, others travel.
_LARGEST_PART = 16 << 20
_SMALLEST_PART = 1 << 20
#: A part takes at most one in so many of a node's object store: ten receivers have three different parts each under way.
_SHARE = 32
#: Parts of a record that its holder keeps in the store for further receivers.
WINDOW = 4
#: Seconds for which a record is kept open, with its last parts, for the next request. A request after that opens it again.
_IDLE = 5.0


class Part(NamedTuple):
    """A piece of a record: bytes of one of its segments."""

    segment: int
    offset: int
    nbytes: int


def part_nbytes(store_nbytes: int) -> int:
    """Return the size of parts that go through an object store of this size."""
    return max(_SMALLEST_PART, min(_LARGEST_PART, store_nbytes // _SHARE))


def parts_of(segments: Sequence[SegmentInfo], nbytes: int) -> list[Part]:
    """Cut segments into parts of so many bytes at most."""
    return [
        Part(number, offset, min(nbytes, info.nbytes - offset))
        for number, info in enumerate(segments)
        for offset in range(0, info.nbytes, nbytes)
    ]


def in_turn(count: int) -> Iterator[int]:
    """Yield the numbers of the parts, window by window, in an order of the receiver's own.

    Receivers that begin at different parts of a window have something to send to each other; see :class:`Sending` for why they
    do not leave the window.
    """
    first = random.randrange(WINDOW)
    for start in range(0, count, WINDOW):
        size = min(WINDOW, count - start)
        yield from (start + (first + index) % size for index in range(size))


class Sending:
    """A record that is being sent, whoever asks for its parts.

    :param record: taken over.
    :param nbytes: bytes of a part.
    :param mover: one of :data:`shared_rpc_ray.settings.MOVERS`.
    """

    def __init__(self, record: AsyncExportedRecord, nbytes: int, mover: str) -> None:
        self.record = record
        self.mover = mover
        self._used = time.monotonic()
        self.parts = parts_of([segment.info for segment in record.segments], nbytes)
        #: References and digests of parts by their numbers, the least recently put first.
        self._kept: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}

    async def part(self, number: int) -> tuple[Any, bytes]:
        """Return the reference of a part, and the digest of its bytes."""
        self._used = time.monotonic()
        if number not in self._kept:
            self._kept[number] = asyncio.ensure_future(asyncio.to_thread(self._put, number))
            while len(self._kept) > WINDOW:
                del self._kept[next(iter(self._kept))]
        kept = self._kept[number]
        try:
            return await asyncio.shield(kept)
        except BaseException:
            if self._kept.get(number) is kept and kept.done():
                del self._kept[number]  # the store may have room later
            raise

    def is_idle(self) -> bool:
        """Return whether nobody has asked for a part in the last :data:`_IDLE` seconds."""
        return time.monotonic() - self._used > _IDLE and all(kept.done() for kept in self._kept.values())

    def drop(self) -> None:
        """Put the parts again for the requests from here on."""
        self._kept.clear()

    async def close(self) -> None:
        """Drop the parts, and release the record."""
        self.drop()
        await self.record.close()

    def _put(self, number: int) -> tuple[Any, bytes]:
        part = self.parts[number]
        segment = self.record.segments[part.segment]
        if self.mover == "nixl":
            tensor = _slice(segment, part)
            return ray.put(tensor, _tensor_transport="nixl"), _tensor_digest(tensor)
        data = _host_bytes(segment, part)
        return ray.put(_Bytes(data)), xxhash.xxh3_128_digest(data)


def take(given: Any, room: RecordBytes, part: Part, mover: str) -> bytes:
    """Write a part to its place, and return its digest.

    :param given: the object that was put, or with NIXL its reference.
    """
    segment = room.segments[part.segment]
    if mover == "nixl":
        target = _slice(segment, part)
        _set_target(given, target)
        ray.get(given)
        return _tensor_digest(target)
    data = given.data
    if len(data) == part.nbytes:
        _write(segment, part, data)
    return xxhash.xxh3_128_digest(data)


class _Bytes:
    """Bytes that Ray takes without pickling: it copies them once, into the object store, where the receiver reads them."""

    def __init__(self, data: Any) -> None:
        self.data = memoryview(data)

    def __reduce__(self) -> tuple[type[_Bytes], tuple[pickle.PickleBuffer]]:
        return _Bytes, (pickle.PickleBuffer(self.data),)


def _host_bytes(segment: SegmentBytes, part: Part) -> Any:
    """Return the bytes of a part as a buffer, which is a copy for the memory of a GPU."""
    if segment.info.device == "cpu":
        return segment.buffer()[part.offset : part.offset + part.nbytes]
    return _slice(segment, part).cpu().numpy()


def _write(segment: SegmentBytes, part: Part, data: memoryview) -> None:
    if segment.info.device == "cpu":
        segment.write(part.offset, data)
        return
    import torch

    _slice(segment, part).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _slice(segment: SegmentBytes, part: Part) -> Any:
    return segment.tensor()[part.offset : part.offset + part.nbytes]


def _set_target(reference: Any, target: Any) -> None:
    from ray.experimental import set_target_for_ref

    set_target_for_ref(reference, [target])


def _tensor_digest(tensor: Any) -> bytes:
    """Return a digest that a GPU computes where the bytes lie: the sum of their words, modulo 2**64."""
    import torch

    whole = tensor.numel() // 8 * 8
    words = int(tensor[:whole].clone().view(torch.int64).sum()) if whole else 0
    rest = bytes(tensor[whole:].cpu().tolist())
    return words.to_bytes(8, "little", signed=True) + rest
