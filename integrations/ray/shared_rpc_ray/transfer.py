"""Transfer of a record from the agent of one node to those of others, through Ray's object store.

A record is cut into *parts*. Its holder puts a part into the store when the first receiver asks for it, and answers with the
reference and a digest; further receivers get the same reference, and Ray pulls the part from any node that has it. The holder
keeps the references of the last :data:`WINDOW` parts only, so a small store suffices for a record of any size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy
import ray
import xxhash

from shared_rpc.client.exported import AsyncExportedRecord, RecordBytes, SegmentBytes
from shared_rpc.protocol.records import SegmentInfo

#: Bytes of a part at most. A part costs Ray some milliseconds; while one is written, others travel.
_LARGEST_PART = 16 << 20
_SMALLEST_PART = 1 << 20
#: A part takes at most one in so many of a node's object store: ten receivers have two different parts each under way, and Ray
#: has not freed others yet.
_SHARE = 32
#: Parts of a record that its holder keeps in the store for further receivers.
WINDOW = 4
#: Seconds after the last request in which a record is kept open at least. A request after that opens it again.
_IDLE = 1.0


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


def in_turn(count: int, first: int) -> Iterator[int]:
    """Yield the numbers of the parts, window by window, from the ``first`` one of each window on.

    Receivers that begin at different parts of a window have something to send to each other; see :class:`Sending` for why they
    do not leave the window.
    """
    for start in range(0, count, WINDOW):
        size = min(WINDOW, count - start)
        yield from (start + (first + index) % size for index in range(size))


class Sending:
    """A record that is being sent, whoever asks for its parts.

    :param record: taken over.
    :param nbytes: bytes of a part.
    :param mover: one of :data:`shared_rpc_ray.membership.MOVERS`.
    """

    def __init__(self, record: AsyncExportedRecord, nbytes: int, mover: str) -> None:
        self.record = record
        self.parts = parts_of([segment.info for segment in record.segments], nbytes)
        self._mover = mover
        self._receivers = 0
        self._used = time.monotonic()
        #: References and digests of parts by their numbers, the least recently put first.
        self._kept: dict[int, Future[tuple[Any, bytes]]] = {}
        #: Parts are put one after the other: the first one travels while the next one is put.
        self._putter = ThreadPoolExecutor(1)

    async def part(self, number: int) -> tuple[Any, bytes]:
        """Return the reference of a part, and the digest of its bytes."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self._begin(number)))
        except Exception:
            self._kept.pop(number, None)  # the store may have room later
            raise

    def begin(self) -> int:
        """Put the first parts, for which a receiver is about to ask; return the one with which it is to begin."""
        if not self._kept:
            for number in range(min(WINDOW, len(self.parts))):
                self._begin(number)
        self._receivers += 1
        return (self._receivers - 1) % WINDOW

    def _begin(self, number: int) -> Future[tuple[Any, bytes]]:
        self._used = time.monotonic()
        if number not in self._kept:
            self._kept[number] = self._putter.submit(self._put, number)
            while len(self._kept) > WINDOW:
                del self._kept[next(iter(self._kept))]
        return self._kept[number]

    def drop(self) -> None:
        """Put the parts again for the requests from here on."""
        self._kept.clear()

    async def close(self) -> None:
        """Drop the parts, and release the record."""
        self.drop()
        await asyncio.to_thread(self._putter.shutdown)
        await self.record.close()

    def idle(self) -> bool:
        """Return whether no receiver has asked for a part in the last :data:`_IDLE` seconds, or waits for one."""
        return time.monotonic() - self._used > _IDLE and all(kept.done() for kept in self._kept.values())

    def _put(self, number: int) -> tuple[Any, bytes]:
        part = self.parts[number]
        segment = self.record.segments[part.segment]
        array = _array(segment, part)
        digest = xxhash.xxh3_128_digest(array.data)
        if self._mover == "nixl":
            return ray.put(_slice(segment, part), _tensor_transport="nixl"), digest
        return ray.put(array), digest


def take(given: Any, record: RecordBytes, part: Part, mover: str) -> bytes:
    """Write a part to its place, and return its digest.

    :param given: the object that was put, or with NIXL its reference.
    """
    segment = record.segments[part.segment]
    if mover == "nixl":
        target = _slice(segment, part)  # Ray does not keep it
        ray.experimental.set_target_for_ref(given, [target])
        ray.get(given)
        given = _array(segment, part).data
    elif segment.info.device == "cpu":
        segment.write(part.offset, given.data)
    else:
        import torch

        _slice(segment, part).copy_(torch.frombuffer(bytearray(given), dtype=torch.uint8))
    return xxhash.xxh3_128_digest(given)


def _array(segment: SegmentBytes, part: Part) -> numpy.ndarray[Any, Any]:
    """Return a part as Ray takes it without pickling, and copies it once; one in the memory of a GPU is copied here."""
    if segment.info.device == "cpu":
        return numpy.frombuffer(segment.buffer(), numpy.uint8, part.nbytes, part.offset)
    return _slice(segment, part).cpu().numpy()  # type: ignore[no-any-return]


def _slice(segment: SegmentBytes, part: Part) -> Any:
    return segment.tensor()[part.offset : part.offset + part.nbytes]
