"""Slabs: small results share one segment without overlap, which is freed with the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc.codec.results import decode_result
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.records import Record
from shared_rpc.memory.slabs import LARGEST, Slabs

Published = Callable[..., Record]
Mapped = Callable[[], int]


@pytest.fixture
def slabs(no_leaks: None) -> Iterator[Slabs]:
    """The slabs of this process in its role as a server."""
    MAPPINGS.release_slabs()
    slabs = Slabs()
    yield slabs
    slabs.close()


@pytest.fixture
def mapped(slabs: Slabs) -> Mapped:
    """The number of this test's mappings: earlier ones of the process do not count."""
    before = len(MAPPINGS)
    return lambda: len(MAPPINGS) - before


def segment_of(record: Record) -> str:
    """Return the id of a record's only segment."""
    [segment] = record.segments
    return segment.info.id


def value_of(record: Record) -> Any:
    """Return the value as a client gets it."""
    return decode_result(record.skeleton, record.table, record.segments)


def test_small_values_share_a_slab(device: str, slabs: Slabs, published: Published) -> None:
    """Each shares memory with its maker's, and with nothing else."""
    made = [torch.full((size,), float(size), device=device) for size in (1, 1000, 3)]
    records = [published(value, slabs=slabs) for value in made]
    assert len(set(map(segment_of, records))) == 1
    theirs = [value_of(record) for record in records]
    theirs[1].fill_(5)
    assert [value.unique().tolist() for value in made] == [[1], [5], [3]]
    assert [value.numel() for value in theirs] == [1, 1000, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.zeros(LARGEST + 1, dtype=torch.uint8, device=device),
        lambda device: [torch.zeros(LARGEST // 8, device=device), torch.zeros(LARGEST // 8 + 1, device=device)],
        lambda device: nn.Linear(2, 2, device=device),
    ],
    ids=["large", "large-together", "weights"],
)
def test_large_values_have_separate_segments(
    device: str, slabs: Slabs, published: Published, make: Callable[[str], Any]
) -> None:
    """As do weights, so that they can be moved to another tier separately."""
    one, other = (published(make(device), slabs=slabs) for _ in range(2))
    assert not {segment.info.id for segment in one.segments} & {segment.info.id for segment in other.segments}


def test_read_only_memory_is_in_separate_slabs(device: str, slabs: Slabs, published: Published) -> None:
    """A slab is sealed as a whole."""
    values = [torch.ones(4, device=device) for _ in range(2)]
    records = [published(value, access, slabs=slabs) for value, access in zip(values, ("read_write", "read"), strict=True)]
    assert len(set(map(segment_of, records))) == 2
    assert [record.segments[0].info.access for record in records] == ["read_write", "read"]
    assert [found[0].sealed for value in values if (found := MAPPINGS.find(value.data_ptr())) is not None] == [False, True]


def test_a_full_slab_ends_with_its_last_value(device: str, slabs: Slabs, published: Published, mapped: Mapped) -> None:
    """The next one is twice as large."""
    first = published(torch.zeros(LARGEST, dtype=torch.uint8, device=device), slabs=slabs)
    second = published(torch.ones(4, device=device), slabs=slabs)
    assert segment_of(first) == segment_of(second)
    kept = value_of(second)
    later = published(torch.zeros(LARGEST, dtype=torch.uint8, device=device), slabs=slabs)
    assert later.segments[0].info.nbytes == 2 * first.segments[0].info.nbytes
    for record in (first, second):
        record.close()
    MAPPINGS.drain()
    assert mapped() == 2 and kept.tolist() == [1] * 4
    del kept
    MAPPINGS.drain()
    assert mapped() == 1  # the slab that is filled now


def test_a_value_that_lies_in_a_slab_is_not_moved(device: str, slabs: Slabs, published: Published) -> None:
    """A part of it is published in place."""
    value = torch.arange(8, device=device)
    whole, part = published(value, slabs=slabs), published(value[4:], slabs=slabs)
    assert segment_of(whole) == segment_of(part)
    value_of(part).fill_(0)
    assert value.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]


def test_a_full_device_gets_a_small_slab(
    device: str, slabs: Slabs, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure for a larger one."""
    first = published(torch.zeros(LARGEST, dtype=torch.uint8, device=device), slabs=slabs)
    limit = first.segments[0].info.nbytes
    backend = type(backend_for(first.segments[0].info.device))
    create = backend.create

    def limited(self: Any, nbytes: int) -> Any:
        if nbytes > limit:
            raise CapabilityError("no memory")
        return create(self, nbytes)

    monkeypatch.setattr(backend, "create", limited)
    records = [published(torch.zeros(LARGEST, dtype=torch.uint8, device=device), slabs=slabs) for _ in range(2)]
    assert [record.segments[0].info.nbytes for record in records] == [limit, limit]


def test_a_reader_keeps_the_latest_slabs_mapped(device: str, slabs: Slabs, published: Published, mapped: Mapped) -> None:
    """The next result in one needs no mapping. The end of its session unmaps them."""
    slabs.close()  # the maker keeps none, so that each value has another slab
    for _ in range(6):
        record = published(torch.ones(4, device=device), slabs=slabs)
        MAPPINGS.keep_slab(record.segments[0].info)
        record.close()
    MAPPINGS.drain()
    assert mapped() == 4
    MAPPINGS.release_slabs()
    assert mapped() == 0


def test_values_keep_their_slab_mapped(device: str, slabs: Slabs, published: Published, mapped: Mapped) -> None:
    """It is rebuilt without attaching the slab, which stays mapped after the end of the session until the value is gone."""
    record = published(torch.arange(4.0, device=device), slabs=slabs)
    MAPPINGS.keep_slab(record.segments[0].info)
    value = value_of(record)
    record.close()
    slabs.close()
    MAPPINGS.release_slabs()
    assert mapped() == 1
    assert value.tolist() == [0, 1, 2, 3]
    del value
    MAPPINGS.drain()
    assert mapped() == 0


class Value:
    """A value in a slab."""


def test_slabs_of_released_values_are_unmapped(mapped: Mapped) -> None:
    """Except the latest few, although the uses of values in a slab end late."""
    for _ in range(12):
        with MAPPINGS.create(2 << 20, "cpu", slab=True) as mapping:
            info, value = mapping.info, Value()
            MAPPINGS.keep_for([(mapping, value)])
        MAPPINGS.keep_slab(info)
        del mapping, value
        MAPPINGS.make_in_slab(info, lambda mapping: Value(), "second")
        if MAPPINGS.has_unused:
            MAPPINGS.drain()
    assert mapped() <= 5
    MAPPINGS.release_slabs()
