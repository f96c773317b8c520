"""Pools: memory for the tensors of single calls.

A pool belongs to one side of one session, and is mapped by the other side, its reader, once. Blocks are copied into *chunks* of
its *arenas*; a chunk is reused when the reader has returned it. A block that does not fit has a segment of its own.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Sequence

import msgspec

from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.memory.layout import Extents, aligned
from shared_rpc.memory.mapping import MAPPINGS, Mapping, MappingHold


class PoolOptions(msgspec.Struct, frozen=True):
    """Sizes of the pools of a session, in bytes: one for arguments, one for results, for each device.

    A pool begins with an arena of ``initial`` bytes and doubles on demand, up to ``limit``. Memory larger than a quarter of the
    limit gets its own segment, as does all memory while the pool is full or with ``limit=0``.

    :raises ConfigurationError: for invalid sizes.
    """

    initial: int = 4 << 20
    limit: int = 256 << 20

    def __post_init__(self) -> None:
        if self.limit < 0 or self.initial <= 0:
            raise ConfigurationError(f"{self}: use initial from 1 byte on, and limit from 0 on (0: no pool)")


class Chunk(msgspec.Struct, eq=False):
    """``nbytes`` bytes at ``offset`` of an arena."""

    number: int
    arena: Arena
    offset: int
    nbytes: int


class Arena(msgspec.Struct, eq=False):
    """A segment of a pool. A reference to one of its chunks keeps it mapped, even if the pool is closed."""

    hold: MappingHold
    mapping: Mapping
    extents: Extents


class Pool:
    """All arenas of one side of one session. Thread-safe."""

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        #: Maximum bytes of a message's blocks in the pool.
        self.largest = options.limit // 4
        self._lock = threading.RLock()  # a signal handler may close the client of the thread that has it
        self._arenas: dict[str, list[Arena]] = {}
        self._chunks: dict[int, Chunk] = {}
        #: Chunk numbers of different pools differ: a number received in a wrong session frees nothing there.
        self._numbers = itertools.count(int.from_bytes(os.urandom(5)) << 22)
        self._closed = False

    def acquire(self, device: str, sizes: Sequence[int]) -> list[Chunk] | None:
        """Return a chunk for each of ``sizes`` bytes on a device; None if they are too large, or the pool is full or closed."""
        needed = [max(aligned(size), aligned(1)) for size in sizes]
        if sum(needed) > self.largest:
            return None
        chunks: list[Chunk] = []
        with self._lock:
            try:
                for nbytes in needed:
                    chunk = self._acquire(device, nbytes)
                    if chunk is None:
                        break
                    chunks.append(chunk)
            finally:
                complete = len(chunks) == len(needed)
                if not complete:
                    self.release([taken.number for taken in chunks])
        return chunks if complete else None

    def acquire_one(self, device: str, nbytes: int) -> Chunk | None:
        """Return a single chunk: :meth:`acquire` for an aligned number of bytes."""
        with self._lock:
            return self._acquire(device, nbytes) if nbytes <= self.largest else None

    def _acquire(self, device: str, nbytes: int) -> Chunk | None:
        if self._closed:
            return None
        arenas = self._arenas.setdefault(device, [])
        # The newest arena is the largest.
        for arena in reversed(arenas):
            offset = arena.extents.acquire(nbytes)
            if offset is not None:
                break
        else:
            grown = self._grow(arenas, device, nbytes)
            if grown is None:
                return None
            arena, offset = grown, grown.extents.acquire(nbytes)
        assert offset is not None, "a new arena is large enough for the chunk"
        chunk = Chunk(next(self._numbers), arena, offset, nbytes)
        self._chunks[chunk.number] = chunk
        return chunk

    def _grow(self, arenas: list[Arena], device: str, nbytes: int) -> Arena | None:
        total = sum(arena.mapping.info.nbytes for arena in arenas)
        size = min(max(nbytes, total, self.options.initial), self.options.limit - total)
        if size < nbytes:
            return None
        try:
            with MAPPINGS.create(size, device, arena=True) as mapping:
                mapping.publish("read_write")
                arena = Arena(MAPPINGS.hold(mapping), mapping, Extents(mapping.info.nbytes))
        except CapabilityError:
            return None  # a separate segment may be smaller
        arenas.append(arena)
        return arena

    def release(self, numbers: Iterable[int]) -> int:
        """Free chunks; return how many. Numbers not in use are ignored."""
        freed = 0
        with self._lock:
            for number in numbers:
                chunk = self._chunks.pop(number, None)
                if chunk is not None:
                    chunk.arena.extents.release(chunk.offset, chunk.nbytes)
                    freed += 1
        return freed

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        with self._lock:
            return sum(arena.mapping.info.nbytes for arenas in self._arenas.values() for arena in arenas)

    @property
    def used(self) -> int:
        """The number of chunks in use."""
        return len(self._chunks)

    def close(self) -> None:
        """End the session: nothing can be acquired any more. The memory is freed when neither side has a tensor over it."""
        with self._lock:
            self._closed = True
            self._arenas.clear()
            self._chunks.clear()
        MAPPINGS.drain()
