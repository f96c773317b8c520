"""Pools: memory for the tensors of single calls.

A pool belongs to one side of one session, and is mapped by the other side, its reader, once. Blocks are copied into *chunks* of
its *arenas*; a chunk is reused when the reader has returned it. The transport of that report is not known here.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from shared_rpc.errors import ConfigurationError
from shared_rpc.memory.arena import Extents, aligned
from shared_rpc.memory.mapping import MAPPINGS, Mapping, MappingHold


class PoolOptions(msgspec.Struct, frozen=True):
    """Sizes of the pools of a session, in bytes: one for arguments, one for results, for each device.

    A pool begins with an arena of ``initial`` bytes and doubles on demand, up to ``limit``. Memory larger than a quarter of the
    limit has its own segment. With ``limit=0`` all memory has.

    :raises ConfigurationError: for invalid sizes.
    """

    initial: int = 4 << 20
    limit: int = 256 << 20

    def __post_init__(self) -> None:
        if self.limit < 0 or self.initial <= 0:
            raise ConfigurationError(f"{self}: use initial from 1 byte on, and limit from 0 on (0: no pool)")


class PoolClosed(Exception):
    """Use of a pool after the end of its session."""


class PoolFull(Exception):
    """Lack of free memory; the text lists the holders, and ``frees`` is the value of :attr:`Pool.frees` then."""

    def __init__(self, text: str, frees: int) -> None:
        super().__init__(text)
        self.frees = frees


class Chunk(msgspec.Struct, eq=False):
    """``nbytes`` bytes at ``offset`` of an arena. ``purpose`` describes them for error texts."""

    number: int
    arena: Arena
    offset: int
    nbytes: int
    purpose: str


class Arena(msgspec.Struct, eq=False):
    """A segment of a pool. A reference to one of its chunks keeps it mapped, even if the pool is closed."""

    hold: MappingHold
    mapping: Mapping
    extents: Extents


class Pool:
    """All arenas of one side of one session. Thread-safe.

    :param what: its name in errors.
    """

    def __init__(self, options: PoolOptions, what: str) -> None:
        self.options = options
        #: Maximum bytes of a block in the pool.
        self.largest = options.limit // 4
        self._what = what
        self._lock = threading.Lock()
        self._arenas: dict[str, list[Arena]] = {}
        self._chunks: dict[int, Chunk] = {}
        #: Chunk numbers of different pools differ: a number received in a wrong session frees nothing there.
        self._numbers = itertools.count(secrets.randbits(42) << 20)
        self._closed = False
        #: Bytes of all chunks in use.
        self.taken = 0
        #: Number of chunks freed so far: shows whether another attempt can succeed.
        self.frees = 0
        #: Callbacks that wait for the next free chunk.
        self._waiting: list[Callable[[], object]] = []

    def acquire(self, device: str, sizes: Sequence[int], purpose: str) -> list[Chunk]:
        """Return a chunk for each of ``sizes`` bytes on a device, all or none.

        :raises PoolFull: if there is too little free memory for them.
        :raises PoolClosed: if the session has ended.
        :raises CapabilityError: if the device has too little memory for a larger pool.
        """
        chunks: list[Chunk] = []
        with self._lock:
            if self._closed:
                raise PoolClosed(f"{self._what} was closed with its session")
            arenas = self._arenas.setdefault(device, [])
            try:
                for size in sizes:
                    chunks.append(self._acquire(arenas, device, max(aligned(size), aligned(1)), purpose))
            except BaseException:
                for chunk in chunks:
                    self._free(chunk)
                raise
        return chunks

    def acquire_one(self, device: str, nbytes: int, purpose: str) -> Chunk:
        """Return a single chunk: :meth:`acquire` for an aligned number of bytes."""
        with self._lock:
            if self._closed:
                raise PoolClosed(f"{self._what} was closed with its session")
            return self._acquire(self._arenas.setdefault(device, []), device, nbytes, purpose)

    def _acquire(self, arenas: list[Arena], device: str, nbytes: int, purpose: str) -> Chunk:
        # The newest arena is the largest.
        for arena in reversed(arenas):
            offset = arena.extents.acquire(nbytes)
            if offset is not None:
                break
        else:
            arena = self._grow(arenas, device, nbytes)
            offset = arena.extents.acquire(nbytes)
        assert offset is not None, "a new arena is large enough for the chunk"
        chunk = Chunk(next(self._numbers), arena, offset, nbytes, purpose)
        self._chunks[chunk.number] = chunk
        self.taken += nbytes
        return chunk

    def _grow(self, arenas: list[Arena], device: str, nbytes: int) -> Arena:
        total = sum(arena.mapping.info.nbytes for arena in arenas)
        size = min(max(nbytes, total, self.options.initial), self.options.limit - total)
        if size < nbytes:
            raise PoolFull(self._held(total, nbytes), self.frees)
        with MAPPINGS.create(size, device) as mapping:
            mapping.pooled = True
            mapping.publish("read_write")
            arena = Arena(MAPPINGS.hold(mapping), mapping, Extents(mapping.info.nbytes))
        arenas.append(arena)
        return arena

    def _held(self, total: int, nbytes: int) -> str:
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for chunk in self._chunks.values():
            sizes[chunk.purpose] += chunk.nbytes
            counts[chunk.purpose] += 1
        holders = ", ".join(f"{counts[name]} of {name} with {size} bytes" for name, size in sizes.most_common(5))
        limit = self.options.limit
        return (
            f"{self._what} has no free memory for {nbytes} bytes: {total} of at most {limit} bytes exist, in use are {holders}"
        )

    def release(self, numbers: Iterable[int]) -> int:
        """Free chunks; return how many. Numbers not in use are ignored."""
        freed = 0
        with self._lock:
            for number in numbers:
                chunk = self._chunks.get(number)
                if chunk is not None:
                    self._free(chunk)
                    freed += 1
            self.frees += freed
            if freed:
                self._wake()
        return freed

    def notify(self, wake: Callable[[], object], frees: int) -> None:
        """Call ``wake`` once, when the pool is closed or has freed a chunk since :attr:`frees` was ``frees``, perhaps now.

        It is called from any thread, under the pool's lock: it must only signal.
        """
        with self._lock:
            self._waiting.append(wake)
            if self._closed or self.frees != frees:
                self._wake()

    def forget(self, wake: Callable[[], object]) -> None:
        """Drop a callback of :meth:`notify`, which is not called from now on."""
        with self._lock:
            if wake in self._waiting:
                self._waiting.remove(wake)

    def _wake(self) -> None:
        while self._waiting:
            self._waiting.pop()()

    def _free(self, chunk: Chunk) -> None:
        del self._chunks[chunk.number]
        self.taken -= chunk.nbytes
        chunk.arena.extents.release(chunk.offset, chunk.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        with self._lock:
            return sum(arena.mapping.info.nbytes for arenas in self._arenas.values() for arena in arenas)

    @property
    def used(self) -> int:
        """The number of chunks in use."""
        return len(self._chunks)

    @property
    def closed(self) -> bool:
        """True if nothing can be acquired any more."""
        return self._closed

    def refuse(self) -> None:
        """Refuse new messages, and wake the waiters. Chunks in use stay."""
        with self._lock:
            self._closed = True
            self._wake()

    def close(self) -> None:
        """End the session: nothing can be acquired any more. The memory is freed when neither side has a tensor over it."""
        self.refuse()
        with self._lock:
            self._arenas.clear()
            self._chunks.clear()
        MAPPINGS.drain()
