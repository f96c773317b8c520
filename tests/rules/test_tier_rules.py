"""The rules of tiers: destinations of objects, and valid copies. Without a device's memory, and without a clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shared_rpc.errors import CapabilityError
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.protocol.records import Access, HostCopy, SegmentInfo, Tier
from shared_rpc.server.state.tiers import Copies, is_good, next_tier, outlives_use
from tests.rules.test_store import segment_of

GPU = "GPU-1"


def copy_of(tier: Tier, nbytes: int = 100, **facts: Any) -> LowerCopy:
    """Return a copy with its own descriptor."""
    return LowerCopy(segment_of(SegmentInfo("copy", nbytes, "cpu")), tier, **facts)


@pytest.fixture
def copies() -> Iterator[Copies]:
    """An empty set of copies."""
    copies = Copies()
    yield copies
    for segment_id in ("a", "b", "a.1"):
        copies.discard(segment_id)


@pytest.mark.parametrize(
    ("current", "devices", "to", "files", "chosen"),
    [
        ("device", {GPU}, "", False, "host"),
        ("device", {GPU, "cpu"}, "host", False, "host"),
        ("device", {GPU}, "file", True, "file"),
        ("device", {"cpu"}, "", True, "file"),
        ("host", {GPU}, "", True, "file"),
        ("host", {GPU}, "", False, None),
        ("host", {GPU}, "host", True, None),
        ("file", {GPU}, "host", True, None),
    ],
)
def test_the_tier_to_which_an_object_is_moved(current: Tier, devices: set[str], to: str, files: bool, chosen: Any) -> None:
    """The requested one, or the next one; None if it is there or lower."""
    assert next_tier(current, devices, to, files=files) == chosen


@pytest.mark.parametrize(
    ("devices", "to", "says"),
    [({"cpu"}, "", "--spill-dir"), ({GPU}, "file", "--spill-dir"), ({"cpu"}, "host", "to='file'"), ({GPU}, "disk", "'disk'")],
)
def test_missing_tiers_are_refused(devices: set[str], to: str, says: str) -> None:
    """The error gives the remedy."""
    with pytest.raises(CapabilityError, match=says):
        next_tier("device", devices, to, files=False)


@pytest.mark.parametrize(
    ("accesses", "host_copy", "outlives"),
    [
        (["read", "read"], "on_evict", True),
        (["read", "private"], "on_evict", True),
        (["read", "read_write"], "on_evict", False),
        (["read_write"], "at_build", True),
    ],
)
def test_copies_may_outlive_a_use_of_their_object(accesses: list[Access], host_copy: HostCopy, outlives: bool) -> None:
    """If clients cannot write, or the app has promised that every write has a revision."""
    assert outlives_use([SegmentInfo("a", 1, "cpu", access) for access in accesses], host_copy) is outlives


def test_a_copy_is_good_for_its_revision() -> None:
    """Not for a later one, and not while the memory is written to."""
    copy = copy_of("file", revision=4)
    assert is_good(copy, 4)
    assert not is_good(copy, 6) and not is_good(copy, None) and not is_good(None, 0)
    copy.close()


def test_copies_are_counted_by_tier_and_device(copies: Copies) -> None:
    """Each uses a descriptor, and replaces another one of its tier."""
    on_gpu, on_host = SegmentInfo("a", 100, GPU), SegmentInfo("b", 50, "cpu")
    copies.add(on_gpu, copy_of("host"))
    copies.add(on_gpu, copy_of("file"))
    copies.add(on_host, copy_of("file", 50))
    assert (copies.usage(), copies.usage(GPU), copies.nbytes("file", "cpu")) == (
        {"host": 100, "file": 150},
        {"host": 100, "file": 100},
        50,
    )
    earlier = copies.highest("a")
    copies.add(on_gpu, copy_of("host", 60))
    assert earlier.segment.closed and copies.nbytes("host") == 60 and len(copies) == 3
    copies.discard("a", "host")
    assert copies.highest("a").tier == "file" and copies.usage() == {"file": 150}
    copies.discard("a")
    assert copies.of("a") == [] and copies.get("a", "file") is None and len(copies) == 1


def test_copies_are_renamed_with_their_segment(copies: Copies) -> None:
    """They stay what they are."""
    copies.add(SegmentInfo("a", 100, GPU), copy_of("host"))
    copies.rename("a", "a.1")
    copies.rename("b", "b.1")
    assert copies.of("a") == [] and copies.highest("a.1").tier == "host"
    assert copies.usage(GPU) == {"host": 100}
    copies.discard("a.1")
    assert copies.usage() == {}
