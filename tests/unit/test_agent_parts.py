"""What agents are made of, without Ray: parts of records, memos, holdings, and settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shared_rpc.cluster import nixl_mover
from shared_rpc.cluster.agreement import movers_of
from shared_rpc.cluster.holdings import Holdings, Listed
from shared_rpc.cluster.memo import Memo
from shared_rpc.cluster.movers import LARGEST_PART, ObjectStoreMover, Part, part_nbytes, parts_of, smaller
from shared_rpc.cluster.orders import Build, Group, Key, Version
from shared_rpc.cluster.place import facts_here
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.settings import ClusterSettings, cluster_settings

KEY = Key("load", "load()", Group("f", "cpu", "3.11", "2.13", "0.1"))
OTHER = Key("load", "load(1)", KEY.group)


def segment(nbytes: int) -> SegmentInfo:
    """A segment of so many bytes."""
    return SegmentInfo("s", nbytes, "cpu", "read", "memfd")


def test_parts_cover_every_byte_once() -> None:
    """The last one of each segment is what is left."""
    parts = parts_of([segment(10), segment(3), segment(8)], 4)
    assert parts == [(0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 3), (2, 0, 4), (2, 4, 4)]


@pytest.mark.parametrize(("store", "nbytes"), [(10 << 30, LARGEST_PART), (80 << 20, 8 << 20), (0, 1 << 20)])
def test_parts_are_small_for_a_small_store(store: int, nbytes: int) -> None:
    """Several are under way at a time."""
    assert part_nbytes(store) == nbytes


def test_a_mover_is_found_by_its_name_or_its_class() -> None:
    """What is neither is an error that names both forms."""
    assert type(movers_of("objects", "cpu").make("objects")) is ObjectStoreMover
    own = "tests.unit.test_agent_parts:OwnMover"
    found = movers_of(own, "cpu")
    assert found.wanted == (own, "objects")
    assert type(found.make(own)) is OwnMover
    for wrong in ("nothing", "no_such_module:Mover", "shared_rpc.cluster.movers:NoMover"):
        with pytest.raises(ConfigurationError, match="SHARED_TENSOR_CLUSTER_MOVER"):
            movers_of(wrong, "cpu")


class OwnMover(ObjectStoreMover):
    """A mover of a user's."""


def test_two_agents_agree_on_the_first_mover_that_both_have() -> None:
    """Every one has the object store."""
    objects, own = movers_of("objects", "cpu"), movers_of("tests.unit.test_agent_parts:OwnMover", "cpu")
    assert own.agree(own.wanted) == "tests.unit.test_agent_parts:OwnMover"
    assert objects.agree(own.wanted) == own.agree(objects.wanted) == "objects"


def test_nixl_is_wanted_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` neither uses nor offers it for host memory, or where nothing but TCP is between the hosts."""
    monkeypatch.setattr(nixl_mover, "lacking", lambda: "")
    assert movers_of("nixl", "cpu").wanted == ("nixl", "objects")
    monkeypatch.setattr(nixl_mover, "_RDMA", Path("/nowhere"))
    assert movers_of("auto", "an H200").wanted == ("objects",)
    monkeypatch.setattr(nixl_mover, "_RDMA", Path("/dev"))
    assert movers_of("auto", "an H200").wanted == ("nixl", "objects")
    here = movers_of("auto", "cpu")
    assert (here.wanted, here.agree(("nixl", "objects"))) == (("objects",), "objects")
    assert movers_of("objects", "an H200").agree(("nixl", "objects")) == "objects"


def test_nixl_that_is_not_installed_is_said_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error: the object store does it."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    asked, best = movers_of("nixl", "cpu"), movers_of("auto", "an H200")
    assert asked.wanted == best.wanted == ("objects",)
    assert "not installed" in asked.lacking and not best.lacking


def test_parts_that_are_too_large_are_cut() -> None:
    """Every byte is in one of them."""
    assert smaller([Part(0, 4, 10), Part(1, 0, 3)], 4) == [(0, 4, 4), (0, 8, 4), (0, 12, 2), (1, 0, 3)]


def test_a_memo_outlives_its_agent(tmp_path: Path) -> None:
    """Versions, and builds that have begun."""
    memo, order = Memo(str(tmp_path / "s.sock")), Build("n", KEY, 7, 3)
    memo.note("a", Version(3, "d"))
    memo.note("b", Version(4, "e"))
    memo.begin(order)
    memo.keep_only({"a"})
    again = Memo(str(tmp_path / "s.sock"))
    assert (again.versions, again.builds) == ({"a": Version(3, "d")}, [order])
    again.end(order)
    assert Memo(str(tmp_path / "s.sock")).builds == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"versions": {"a": 3}}', b"\xff\xfe"])
def test_a_memo_that_cannot_be_read_is_empty(tmp_path: Path, content: bytes) -> None:
    """An agent begins without one."""
    (tmp_path / "s.sock.cluster").write_bytes(content)
    memo = Memo(str(tmp_path / "s.sock"))
    assert (memo.versions, memo.builds) == ({}, [])
    memo.note("a", Version(1, "d"))
    assert Memo(str(tmp_path / "s.sock")).versions == {"a": Version(1, "d")}


def test_a_memo_is_not_read_through_a_link(tmp_path: Path) -> None:
    """In a sticky directory, others can make one; and nobody else may read a memo."""
    Memo(str(tmp_path / "t.sock")).note("a", Version(1, "d"))
    assert (tmp_path / "t.sock.cluster").stat().st_mode & 0o777 == 0o600
    os.symlink(tmp_path / "t.sock.cluster", tmp_path / "s.sock.cluster")
    assert Memo(str(tmp_path / "s.sock")).versions == {}


def test_objects_have_the_versions_that_the_memo_knows(tmp_path: Path) -> None:
    """What the broker has built by itself has a version that no other object has."""
    memo = Memo(str(tmp_path / "s.sock"))
    memo.note("a", Version(3, "d"))
    holdings = Holdings(memo)
    stated = holdings.state([Listed(KEY, "a", 10), Listed(OTHER, "b", 20)])
    assert [(found.key, found.version, found.nbytes) for found in stated] == [
        (KEY, Version(3, "d"), 10),
        (OTHER, Version(0, "b"), 20),
    ]
    assert holdings.object_of(KEY, Version(3, "d")) == "a"
    assert holdings.object_of(KEY, Version(4, "e")) is None


def test_what_the_broker_drops_or_replaces_is_lost(tmp_path: Path) -> None:
    """But for keys that an order is changing."""
    holdings = Holdings(Memo(str(tmp_path / "s.sock")))
    holdings.hold(KEY, Version(1, "d"), "a", 10)
    holdings.hold(OTHER, Version(2, "e"), "b", 10)
    known = holdings.known()
    assert holdings.lost([Listed(KEY, "a", 10), Listed(OTHER, "b", 10)], known, set()) == []
    assert holdings.lost([Listed(KEY, "x", 10)], known, {OTHER}) == [(KEY, Version(1, "d"))]
    assert holdings.lost([], known, set()) == [(OTHER, Version(2, "e"))]
    assert len(holdings) == 0


def test_what_changes_while_the_broker_lists_is_not_lost(tmp_path: Path) -> None:
    """The list may be older than what is current, which is lost when a later list does not have it."""
    holdings = Holdings(Memo(str(tmp_path / "s.sock")))
    holdings.hold(KEY, Version(1, "d"), "a", 10)
    known, listed = holdings.known(), [Listed(KEY, "a", 10)]
    holdings.hold(KEY, Version(2, "e"), "b", 10)
    assert holdings.lost(listed, known, set()) == []
    assert holdings.lost(listed, holdings.known(), set()) == [(KEY, Version(2, "e"))]


def test_settings_of_a_cluster() -> None:
    """Unset and empty variables are the defaults."""
    assert cluster_settings({"SHARED_TENSOR_CLUSTER_NAME": " "}) == ClusterSettings("default", "", "", "auto")
    variables = {"SHARED_TENSOR_CLUSTER_NAME": "prod", "RAY_ADDRESS": "a:1", "SHARED_TENSOR_CLUSTER_NODE": "ab"}
    assert cluster_settings(variables) == ClusterSettings("prod", "a:1", "ab", "auto")
    with pytest.raises(ConfigurationError, match="slash"):
        cluster_settings({"SHARED_TENSOR_CLUSTER_NAME": "a/b"})


def test_facts_can_be_set() -> None:
    """One that does not exist is an error that names those that do."""
    assert facts_here(["torch=1.0"])["torch"] == "1.0"
    with pytest.raises(ConfigurationError, match="python"):
        facts_here(["colour=red"])
