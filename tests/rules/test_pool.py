"""Pools and borrowing within one process: the user of each byte, and the time when it is free again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared_rpc.errors import ConfigurationError
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.layout import Extents
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Chunk, Pool, PoolOptions

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), max_size=60))
def test_extents_never_overlap_and_are_merged(steps: list[tuple[int, int]]) -> None:
    """In any order of acquisitions and releases, no byte has two owners, and finally there is one extent."""
    extents = Extents(400)
    taken: list[tuple[int, int]] = []
    for nbytes, drop in steps:
        offset = extents.acquire(nbytes)
        if offset is not None:
            assert offset >= 0
            assert offset + nbytes <= 400
            assert all(offset + nbytes <= start or start + size <= offset for start, size in taken)
            taken.append((offset, nbytes))
        if drop < len(taken):
            extents.release(*taken.pop(drop))
        assert sum(size for _, size in extents.free) == 400 - sum(size for _, size in taken)
    for entry in taken:
        extents.release(*entry)
    assert extents.acquire(400) == 0


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool of at most 4 MiB."""
    with closing(Pool(PoolOptions(initial=MIB, limit=4 * MIB))) as made:
        yield made


def acquired(pool: Pool, *sizes: int) -> list[Chunk]:
    """Return chunks of a pool that is not full."""
    chunks = pool.acquire("cpu", sizes)
    assert chunks is not None
    return chunks


class TestPool:
    """Allocating and freeing chunks."""

    def test_released_chunks_are_reused(self, pool: Pool) -> None:
        """A thousand rounds use only the first arena."""
        for _ in range(1000):
            (chunk,) = acquired(pool, MIB // 2)
            assert pool.release([chunk.number]) == 1
        assert pool.nbytes == MIB
        assert pool.used == 0

    def test_a_pool_doubles_up_to_its_limit(self, pool: Pool) -> None:
        """New arenas are made on demand, within the options."""
        sizes = []
        for _ in range(4):
            acquired(pool, MIB)
            sizes.append(pool.nbytes // MIB)
        assert sizes == [1, 2, 4, 4]

    def test_a_pool_gives_all_chunks_or_none(self, pool: Pool) -> None:
        """It holds nothing of a message that is too large, or for which it has too little free memory."""
        taken = [acquired(pool, MIB // 2) for _ in range(7)]
        assert pool.acquire("cpu", [MIB // 2, MIB // 2]) is pool.acquire("cpu", [MIB, 1]) is None
        assert pool.acquire_one("cpu", MIB) is None
        pool.release([taken[0][0].number])
        assert pool.used + len(acquired(pool, MIB // 2, MIB // 2)) == 8

    def test_an_acquisition_that_raises_holds_nothing(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        """As one by Ctrl-C while the pool grows for the second chunk: the first one is free again."""
        acquired(pool, 1)
        monkeypatch.setattr(pool, "_grow", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            pool.acquire("cpu", [MIB // 2, MIB // 2])
        assert (pool.used, len(acquired(pool, MIB // 2))) == (1, 1)

    def test_releasing_twice_frees_no_other_chunk(self, pool: Pool) -> None:
        """Numbers are not reused: a late or a forged one frees nothing."""
        (first,) = acquired(pool, 100)
        pool.release([first.number])
        (second,) = acquired(pool, 100)
        assert (second.offset, second.number != first.number) == (first.offset, True)
        assert pool.release([first.number, 0, -1, 1 << 63]) == 0
        assert pool.used == 1

    def test_numbers_of_two_pools_differ(self, pool: Pool) -> None:
        """A number in the wrong session frees nothing there."""
        with closing(Pool(PoolOptions())) as other:
            (mine,) = acquired(pool, 1)
            acquired(other, 1)
            assert other.release([mine.number]) == 0

    def test_a_closed_pool_frees_its_memory(self, pool: Pool) -> None:
        """It is unmapped, and gives no further chunks."""
        MAPPINGS.drain()
        before = len(MAPPINGS)
        acquired(pool, 1)
        pool.close()
        assert len(MAPPINGS) == before
        assert pool.acquire("cpu", [1]) is pool.acquire_one("cpu", 512) is None

    @pytest.mark.parametrize("options", [{"limit": -1}, {"initial": 0}])
    def test_invalid_options_are_refused(self, options: dict[str, Any]) -> None:
        """On construction."""
        with pytest.raises(ConfigurationError, match="use initial from 1 byte on"):
            PoolOptions(**options)


class TestBorrower:
    """Detecting that a chunk is free."""

    @pytest.fixture
    def references(self) -> ChunkReferences:
        """References without a callback."""
        return ChunkReferences()

    @staticmethod
    def _storage() -> Any:
        return torch.zeros(4).untyped_storage()

    def test_a_chunk_comes_back_with_its_last_user(self, pool: Pool, references: ChunkReferences) -> None:
        """Not before both storages have ended, and then once."""
        (chunk,) = acquired(pool, 16)
        one, other = self._storage(), self._storage()
        references.acquire(chunk.number, 16, chunk.arena.mapping, [one, other])
        del one
        references.poll()
        assert references.pop_returned() == []
        del other
        references.poll()
        assert references.pop_returned() == [chunk.number]
        assert references.pop_returned() == []
        assert references.in_use == 0

    def test_the_end_of_a_chunk_is_reported(self, pool: Pool) -> None:
        """There may be waiters for the memory."""
        calls: list[int] = []
        references = ChunkReferences(lambda: calls.append(1))
        (chunk,) = acquired(pool, 16)
        storage = self._storage()
        references.acquire(chunk.number, 16, chunk.arena.mapping, [storage])
        assert calls == []
        del storage
        assert calls == [1]
