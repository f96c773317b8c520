"""Transfer of a record from the agent of one node to agents of others, through Ray's object store.

A record is split into *parts*. The source puts a part into the store when the first receiver requests it, and replies with the
reference and a digest; further receivers get the same reference, and Ray pulls the part from any node that has it. The source
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

from shared_rpc.client.exported import ExportedRecord, SegmentBytes
from shared_rpc.protocol.records import SegmentInfo

#: Maximum and minimum size of a part in bytes. A part costs Ray some milliseconds; while one is written, others are
#: transferred.
_LARGEST_PART = 16 << 20
_SMALLEST_PART = 1 << 20
#: A part takes at most this fraction of a node's object store: ten receivers transfer two different parts each, and Ray has not
#: freed others yet.
_SHARE = 32
#: Parts of a record that its source keeps in the store for further receivers.
WINDOW = 4
#: Minimum number of seconds after the last request for which a record is kept open. A later request opens it again.
_IDLE = 1.0


class Part(NamedTuple):
    """A piece of a record: bytes of one of its segments."""

    segment: int
    offset: int
    nbytes: int


def part_nbytes(store_nbytes: int) -> int:
    """Return the size of parts for an object store of this size."""
    return max(_SMALLEST_PART, min(_LARGEST_PART, store_nbytes // _SHARE))


def parts_of(segments: Sequence[SegmentInfo], nbytes: int) -> list[Part]:
    """Split segments into parts of at most ``nbytes`` bytes."""
    return [
        Part(number, offset, min(nbytes, info.nbytes - offset))
        for number, info in enumerate(segments)
        for offset in range(0, info.nbytes, nbytes)
    ]


def in_turn(count: int, first: int) -> Iterator[int]:
    """Yield the numbers of the parts, window by window, starting with the ``first`` one of each window.

    Receivers that start at different parts of a window can send parts to each other. They stay within the window because
    :class:`Sending` keeps no other parts.
    """
    for start in range(0, count, WINDOW):
        size = min(WINDOW, count - start)
        yield from (start + (first + index) % size for index in range(size))


class Sending:
    """A record that is sent to any number of receivers.

    :param record: closed with this object.
    :param nbytes: bytes of a part.
    :param mover: one of :data:`shared_rpc_ray.membership.MOVERS`.
    """

    def __init__(self, record: ExportedRecord, nbytes: int, mover: str) -> None:
        self.record = record
        self.parts = parts_of([segment.info for segment in record.segments], nbytes)
        self._mover = mover
        self._receivers = 0
        self._used = time.monotonic()
        #: References and digests of parts by their numbers, the oldest first.
        self._kept: dict[int, Future[tuple[Any, bytes]]] = {}
        #: One thread: a part is transferred while the next one is put.
        self._putter = ThreadPoolExecutor(1)

    async def part(self, number: int) -> tuple[Any, bytes]:
        """Return the reference of a part, and the digest of its bytes."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self._begin(number)))
        except Exception:
            self._kept.pop(number, None)  # the store may have capacity later
            raise

    def begin(self) -> int:
        """Put the first parts in advance for a receiver; return the number of its first part."""
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
        """Forget the stored parts, so that later requests put them again."""
        self._kept.clear()

    async def close(self) -> None:
        """Drop the parts, and release the record."""
        self.drop()
        await asyncio.to_thread(self._putter.shutdown)
        self.record.close()

    def idle(self) -> bool:
        """Return True if no part is pending, and none was requested in the last :data:`_IDLE` seconds."""
        return time.monotonic() - self._used > _IDLE and all(kept.done() for kept in self._kept.values())

    def _put(self, number: int) -> tuple[Any, bytes]:
        part = self.parts[number]
        segment = self.record.segments[part.segment]
        array = _array(segment, part)
        digest = xxhash.xxh3_128_digest(array.data)
        if self._mover == "nixl":
            return ray.put(_slice(segment, part), _tensor_transport="nixl"), digest
        return ray.put(array), digest


def take(given: Any, record: ExportedRecord, part: Part, mover: str) -> bytes:
    """Write a part to the record, and return its digest.

    :param given: the part's object, or with NIXL its reference.
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
    """Return a part as an array, which Ray copies once without pickling; a part in GPU memory is copied to the host here."""
    if segment.info.device == "cpu":
        return numpy.frombuffer(segment.buffer(), numpy.uint8, part.nbytes, part.offset)
    return _slice(segment, part).cpu().numpy()  # type: ignore[no-any-return]


def _slice(segment: SegmentBytes, part: Part) -> Any:
    return segment.tensor()[part.offset : part.offset + part.nbytes]
