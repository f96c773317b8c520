"""The rules of raw buffers and quotas, without sockets or devices; the test sets the clock."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared_rpc.errors import BufferNotFound, CapabilityError, ConfigurationError, ServerBusy
from shared_rpc.memory.records import Record
from shared_rpc.protocol.buffers import ITEM_SIZES, Extent
from shared_rpc.protocol.records import EMPTY_TABLE, SegmentInfo
from shared_rpc.server.capacity import Capacity
from shared_rpc.server.state.buffers import BufferTable
from shared_rpc.server.state.objects import StoredObject
from tests.rules.test_store import Shelf, record_of, segment_of

#: The capacity of these tests' device, in bytes.
TOTAL = 10_000


class Buffers(Shelf):
    """A store with buffers; sessions are letters, and their processes are numbered from 1."""

    def __init__(self, max_bytes: int | None = None, **limits: int) -> None:
        super().__init__(max_bytes)
        self.table = BufferTable(self.store, self.leases, self.clock)
        self.capacity = Capacity(self.store, self.leases, self.clock, Mock(), lambda session: ord(session) - 96, limits)
        self.capacity.mover = Mock(is_moving=Mock(return_value=False))

    def make(
        self,
        session: str = "a",
        name: str = "own",
        ttl: float | None = None,
        linger: float = 0.0,
    ) -> StoredObject:
        """Make a new buffer that a session holds."""
        return self.table.add(session, record_of(name), ttl, linger=linger)

    def end(self, session: str, stored: StoredObject) -> float | None:
        """End a session's lease, like a server; return the seconds that the buffer lingers."""
        self.release(session, stored)
        return self.table.settle(stored.object_id)

    def reason(self, stored: StoredObject | str) -> str:
        """Return the reason why a buffer is unavailable."""
        with pytest.raises(BufferNotFound) as caught:
            self.table.get("z", stored if isinstance(stored, str) else stored.object_id)
        return caught.value.reason


@pytest.fixture
def buffers() -> Iterator[Buffers]:
    """A store without limits, which drops everything in the end."""
    buffers = Buffers()
    yield buffers
    buffers.store.clear()


# Listed, and held.


def test_buffers_linger_after_their_last_holder(buffers: Buffers) -> None:
    """During that time others may get them."""
    stored = buffers.make(linger=10)
    assert buffers.end("a", stored) == 10
    buffers.clock.time += 9.5
    assert buffers.table.expire() == 0.5 and buffers.dropped == []
    buffers.table.get("b", stored.object_id)
    buffers.clock.time += 1000
    assert buffers.table.expire() is None and buffers.dropped == []
    assert buffers.end("b", stored) == 10
    buffers.clock.time += 10
    assert buffers.table.expire() is None
    assert buffers.dropped == [stored] and buffers.reason(stored) == "released"


def test_names_are_unique_among_listed_buffers(buffers: Buffers) -> None:
    """A name can be reused once its buffer is no longer listed, for any reason."""
    for end in (lambda stored: buffers.table.free(stored.object_id), lambda stored: buffers.end("a", stored)):
        stored = buffers.table.add("a", record_of("own"), None, name="ring")
        assert buffers.table.named("ring") == stored.object_id
        with pytest.raises(ConfigurationError, match="'ring' already"):
            buffers.table.check_name("ring")
        end(stored)
        buffers.table.check_name("ring")
        with pytest.raises(BufferNotFound):
            buffers.table.named("ring")


def test_a_freed_buffer_goes_with_its_last_holder(buffers: Buffers) -> None:
    """It can no longer be got, and holders keep it."""
    stored = buffers.make()
    buffers.table.get("b", stored.object_id)
    assert buffers.table.free(stored.object_id)
    assert not buffers.table.free(stored.object_id)
    assert buffers.reason(stored) == "freed"
    buffers.release("a", stored)
    assert buffers.dropped == [] and buffers.table.info(stored.object_id)[0] == "freed"
    buffers.release("b", stored)
    assert buffers.dropped == [stored] and len(buffers.table) == 0
    assert buffers.reason(stored) == "freed"


def test_a_result_is_no_buffer(buffers: Buffers) -> None:
    """It can neither be got as one nor freed."""
    result = buffers.add("f(1)", holders="a")
    assert buffers.reason(result) == "unknown"
    assert not buffers.table.free(result.object_id) and result.listed


def test_expiry_does_not_affect_holders(buffers: Buffers) -> None:
    """The ttl limits who may still get it; memory is freed with the last lease."""
    held, idle = buffers.make(ttl=10), buffers.make(name="other", ttl=20)
    buffers.release("a", idle)
    assert buffers.table.expire() == 10
    buffers.clock.time += 10
    assert buffers.table.expire() == 10
    assert buffers.reason(held) == "expired" and buffers.dropped == []
    buffers.clock.time += 10
    assert buffers.table.expire() is None and buffers.dropped == [idle]
    buffers.release("a", held)
    assert buffers.dropped == [idle, held]


@pytest.mark.parametrize("late", ["get", "free", "facts"])
def test_expiry_does_not_depend_on_the_sweeper(buffers: Buffers, late: str) -> None:
    """A request after the time is refused, even before the next sweep."""
    stored = buffers.make(ttl=10)
    buffers.clock.time += 9.5
    buffers.table.get("b", stored.object_id)
    buffers.clock.time += 0.5
    if late == "free":
        assert not buffers.table.free(stored.object_id)
    elif late == "facts":
        assert buffers.table.info(stored.object_id)[0] == "expired"
    assert buffers.reason(stored) == "expired"


def test_the_cache_does_not_evict_buffers() -> None:
    """They count against its budget and evict cached objects, but pinned ones."""
    buffers = Buffers(max_bytes=350)
    pinned = buffers.add("f(0)")
    pinned.pinned = True
    result = buffers.add("f(1)")
    first, second = (buffers.make(name=name) for name in ("one", "two"))
    buffers.store.settle(second.object_id)
    for stored in (first, second):
        buffers.release("a", stored)
    buffers.store.invalidate(endpoint="")
    assert buffers.dropped == [result] and buffers.store.nbytes == 300
    buffers.store.clear()


# Quotas.


def test_a_buffer_ends_with_its_last_lease(buffers: Buffers) -> None:
    """Unless it is kept, or has a ttl."""
    plain, kept = buffers.make("a", "plain"), buffers.table.add("a", record_of("kept"), None, keep=True)
    timed = buffers.make("a", "timed", ttl=10)
    buffers.table.get("b", plain.object_id)
    for session, dropped in (("a", []), ("b", [plain])):
        for stored in (plain, kept, timed):
            buffers.leases.release(session, stored.object_id)
            buffers.table.settle(stored.object_id)
        assert buffers.dropped == dropped
    assert buffers.reason(plain) == "released"
    assert {one.object_id for one in buffers.store} == {kept.object_id, timed.object_id}


def test_leases_are_renewed_after_a_restart(buffers: Buffers) -> None:
    """Other accesses do not end the buffer before its holders return; after the time it may end."""
    stored = [buffers.make("a", name) for name in ("claimed", "forgotten")]
    later = Buffers()
    for one in stored:
        later.table.recover(one, buffers.table.terms(one.object_id))
        later.table.get("z", one.object_id)
        later.leases.release("z", one.object_id)
        later.table.settle(one.object_id)
    later.leases.grant("a", stored[0].object_id)
    later.clock.time += 3599
    assert later.table.expire() == 1.0 and later.dropped == []
    later.clock.time += 1
    assert later.table.expire() is None and later.dropped == [stored[1]]
    later.leases.release("a", stored[0].object_id)
    later.table.settle(stored[0].object_id)
    assert later.dropped == [stored[1], stored[0]]


def test_results_and_buffers_share_a_quota() -> None:
    """Held and listed ones count, each segment once, on its own device only."""
    limited = Buffers(cpu=300)
    limited.add("f(1)", "shared", holders="a")
    limited.add("f(2)", "shared", holders="b")
    limited.make(name="buffer")
    gpu = SegmentInfo("elsewhere", 5000, "GPU-1")
    with segment_of(gpu) as segment:
        limited.table.add("a", Record(b"", EMPTY_TABLE, [segment], 5000), None)
        assert (limited.capacity.used("cpu"), limited.capacity.used("GPU-1")) == (200, 5000)
    limited.capacity.take({"cpu": 100}, totals={"cpu": TOTAL})
    with pytest.raises(ServerBusy, match=r"1 bytes on cpu do not fit: the quota .* is 300, and 300 are in use"):
        limited.capacity.take({"cpu": 1}, totals={"cpu": TOTAL})
    limited.store.clear()


def test_shared_memory_is_freed_with_its_last_object() -> None:
    """Objects that share a segment are dropped together, and nothing counts as freed that a held object keeps."""
    for held, others in ("s2", ["s1", "s1 s2"]), ("s1", ["s1", "s2"]):
        limited = Buffers(cpu=200)
        idle = [limited.add(f"f({number})", *segments.split()) for number, segments in enumerate(others)]
        kept = limited.add("g()", held, holders="a")
        with limited.capacity.take({"cpu": 100}):
            assert (limited.dropped, limited.capacity.used("cpu")) == (idle, 200)
        limited.release("a", kept)
        limited.store.clear()


@pytest.mark.parametrize(("quota", "total", "limit"), [(300, TOTAL, 300), (TOTAL * 2, TOTAL, TOTAL), (None, TOTAL, TOTAL)])
def test_requests_beyond_the_quota_or_the_device_are_refused(quota: int | None, total: int, limit: int) -> None:
    """Waiting would not help."""
    limits = {} if quota is None else {"cpu": quota}
    buffers = Buffers(**limits)
    buffers.capacity.take({"cpu": limit}, totals={"cpu": total})
    with pytest.raises(CapabilityError, match=f"are more than .*, {limit}: ask for less"):
        buffers.capacity.take({"cpu": limit + 1}, totals={"cpu": total})


# Sizes.


def test_the_dtypes_are_those_of_torch() -> None:
    """With their names and sizes. (Some are newer than the oldest supported torch.)"""
    for name, size in ITEM_SIZES.items():
        if hasattr(torch, name):
            assert getattr(torch, name).itemsize == size


@given(st.lists(st.integers(0, 5), max_size=5), st.sampled_from(["bool", "bfloat16", "complex128"]))
def test_shapes_are_laid_out_like_in_torch(shape: list[int], dtype: str) -> None:
    """Contiguous, with the strides of torch even for an empty tensor."""
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    extent = Extent.of(shape, dtype)
    assert (extent.shape, extent.strides, extent.nbytes) == (tensor.shape, tensor.stride(), tensor.nbytes)
    assert Extent.of(1024, dtype) == Extent.of([1024 // tensor.itemsize], dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "text"),
    [
        (-1, "uint8", "a buffer of -1 bytes"),
        (6, "float32", "no whole number of float32 elements of 4 bytes"),
        ([2, -1], "uint8", r"shape \(2, -1\)"),
        ([1 << 62, 2], "uint8", "less than"),
        ([1] * 65, "uint8", "65 dimensions"),
        (4, "qint8", "dtype='qint8' is no dtype of a buffer"),
        (4, "", "use one of bool, "),
    ],
)
def test_impossible_sizes_are_refused(size: int | list[int], dtype: str, text: str) -> None:
    """The error names the problem."""
    with pytest.raises(ConfigurationError, match=text):
        Extent.of(size, dtype)
