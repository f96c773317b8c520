"""Receipts: records that are arriving at a node, part by part, and those who wait for parts of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from shared_rpc.client.exported import AsyncExportedRecord
from shared_rpc.cluster.movers import Part, parts_of, smaller
from shared_rpc.protocol.exported import RecordHeader

__all__ = ["Receipt"]


class Receipt:
    """A record that is arriving: its room, and the parts of it that are missing. A part is here when its digest was checked.

    :param room: taken over; it is closed at the end, or becomes an object.
    :param part_nbytes: bytes of a part.
    """

    def __init__(self, room: AsyncExportedRecord, part_nbytes: int) -> None:
        self.room = room
        self.part_nbytes = part_nbytes
        #: The object that it has become; None before that.
        self.object_id: str | None = None
        #: Whether nothing more arrives. It has become an object then, or was given up.
        self.ended = False
        #: When the last part has arrived.
        self.used = time.monotonic()
        #: Bytes that have arrived, by mover.
        self.movers: Counter[str] = Counter()
        self._content = _content_of(room.header)
        self._missing = parts_of([segment.info for segment in room.segments], part_nbytes)
        self._whole = sum(segment.nbytes for segment in room.segments)
        self._changed = asyncio.Event()

    @property
    def missing(self) -> Sequence[Part]:
        """The parts that are missing, in the order in which they are to be asked for."""
        return tuple(self._missing)

    @property
    def nbytes(self) -> int:
        """Bytes that have arrived."""
        return self._whole - sum(part.nbytes for part in self._missing)

    def is_of(self, header: RecordHeader) -> bool:
        """Return whether a header is that of the record, and what has arrived is a piece of it."""
        return self._content == _content_of(header)

    def has(self, part: Part) -> bool:
        """Return whether all bytes of a part have arrived; it may be cut otherwise than this record's own parts."""
        begin, end = part.offset, part.offset + part.nbytes
        return not any(
            missing.segment == part.segment and missing.offset < end and begin < missing.offset + missing.nbytes
            for missing in self._missing
        )

    def cut(self, nbytes: int) -> None:
        """Cut the missing parts into smaller ones, if they have more than so many bytes: another mover may have chosen them."""
        self._missing = smaller(self._missing, nbytes)
        self.part_nbytes = min(self.part_nbytes, nbytes)

    def arrived(self, part: Part, mover: str) -> None:
        """Note that a part is in its place, and by which mover, and tell those who wait."""
        self._missing.remove(part)
        self.movers[mover] += part.nbytes
        self.used = time.monotonic()
        self._tell()

    def become(self, object_id: str) -> None:
        """Note that all of it is an object of the broker now."""
        self.object_id = object_id
        self._tell()

    def interrupt(self) -> None:
        """Have those who wait look again: it does not go on for now."""
        self._tell()

    async def end(self) -> None:
        """End it, and close its room; twice is harmless."""
        self.ended = True
        self._tell()
        await self.room.close()

    async def change(self, until: float) -> bool:
        """Wait until a part arrives, or it ends; return False if neither has happened by a time of ``time.monotonic``."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _content_of(header: RecordHeader) -> bytes:
    """Return the parts of a header that are equal at all nodes that have a version: not its generation, for instance."""
    return msgspec.msgpack.encode((header.skeleton, [segment.nbytes for segment in header.segments]))
