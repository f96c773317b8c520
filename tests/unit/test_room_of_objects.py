"""Room among a server's objects, without devices: what gives way of objects that share memory, and of their host copies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shared_rpc.errors import CapabilityError, ServerBusy
from shared_rpc.execution.outcomes import Failure
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import Tier
from shared_rpc.server.device_room import Room, SetAside
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.state.quotas import Quotas
from shared_rpc.server.state.room import Below
from shared_rpc.server.state.tiers import STALE
from tests.unit.test_store import Shelf, record_of


class Store(Shelf):
    """A store with room for 300 bytes, whose moves end when the test says so. A session is a letter."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.quotas = Quotas(self.store, self.leases, {"cpu": 300}, ord)
        self.room = Room(self.store, self.leases, self.quotas, self.clock, lambda seconds: None, ord, lambda: self, **options)
        self.tiers: tuple[Below, ...] = ("host", "file")
        self.moves: list[tuple[list[StoredObject], Below]] = []
        self.reserved = 0
        self.granted: list[SetAside] = []
        self.refused: list[Failure] = []

    # The mover.

    def users(self, stored: StoredObject) -> Sequence[str]:
        """Return the sessions that have it active."""
        return sorted(self.leases.active(stored.object_id))

    def is_moving(self, stored: StoredObject) -> bool:
        """Return whether it was ordered to go."""
        return any(stored in group for group, _ in self.moves)

    def below(self, group: Sequence[StoredObject]) -> tuple[Below, ...]:
        """Return all tiers below."""
        places: tuple[Tier, ...] = ("device", "host", "file")
        return tuple(to for to in self.tiers if places.index(to) > places.index(group[0].tier))

    def has_good_copies(self, group: Sequence[StoredObject], tier: Tier) -> bool:
        """Return whether there are copies, good ones all."""
        return all(self.store.copies.get(segment.info.id, tier) for one in group for segment in one.record.segments)

    def host_takes(self) -> int:
        """Return what a test has reserved."""
        return self.reserved

    def make_room(self, group: Sequence[StoredObject], to: Below) -> None:
        """Note the order."""
        self.moves.append((list(group), to))

    # The test.

    def copy(self, stored: StoredObject, tier: Tier = "host") -> None:
        """Give an object copies."""
        for segment in stored.record.segments:
            own = Segment.owning(segment.info, os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            self.store.copies.add(segment.info, LowerCopy(own, tier))

    def end_move(self) -> None:
        """The first move ends well."""
        group, to = self.moves.pop(0)
        if not self.has_good_copies(group, to):
            for stored in group:
                self.copy(stored, to)
        self.store.evict(group, to)
        if to == "file":
            for segment_id in {segment.info.id for stored in group for segment in stored.record.segments}:
                self.store.copies.discard(segment_id, "host")
        self.room.moved(tuple(stored.object_id for stored in group))
        self.room.expire()

    def ask(self, nbytes: int) -> None:
        """Ask for room."""
        self.room.ask(object(), {"cpu": nbytes}, self.granted.append, self.refused.append)

    def named(self, *orders: tuple[list[StoredObject], Below]) -> list[tuple[list[str | None], str]]:
        """Say orders by keys."""
        return [([stored.cache_key for stored in group], to) for group, to in orders or self.moves]


@pytest.fixture
def evicting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """One that evicts, with room for 200 bytes of host copies."""
    store = Store(when_full="evict", host_quota=200)
    monkeypatch.setattr(store.room, "changed", store.room.expire)  # the loop's next turn is now
    yield store
    store.store.clear()


@pytest.fixture
def refusing() -> Iterator[Store]:
    """One that refuses, with the same."""
    store = Store(host_quota=200)
    yield store
    store.store.clear()


def test_a_record_takes_room_by_what_it_adds(refusing: Store) -> None:
    """A part of what is there already costs nothing, neither bytes nor descriptors."""
    refusing.add("f(1)", "one", "two", holders="a")
    for names, needs in ((("one", "two"), ({}, 0)), (("one", "three"), ({"cpu": 100}, 1))):
        record = record_of(*names)
        assert refusing.room.needs_of(record) == needs
        record.close()


def test_a_server_that_refuses_tells_at_once(refusing: Store) -> None:
    """What is too much now, and what will ever be; what is granted counts until it is redeemed."""
    refusing.add("f(1)", "one", "two", holders="a")
    refusing.ask(101)
    refusing.ask(301)
    assert [failure.code for failure in refusing.refused] == [ServerBusy.code, CapabilityError.code]
    refusing.ask(100)
    assert refusing.room.used("cpu") == 300
    refusing.room.redeem(refusing.granted[0])
    assert refusing.room.used("cpu") == 200 and len(refusing.room) == 0


def test_objects_that_share_memory_go_together(evicting: Store) -> None:
    """When nobody uses any of them."""
    first, second = evicting.add("f(1)", "shared", "own", holders="a"), evicting.add("f(2)", "shared", holders="b")
    evicting.ask(300)
    evicting.leases.suspend("a", first.object_id)
    evicting.room.expire()
    assert evicting.moves == []
    evicting.leases.suspend("b", second.object_id)
    evicting.room.expire()
    assert evicting.named() == [(["f(1)", "f(2)"], "host")]
    evicting.end_move()
    assert len(evicting.granted) == 1 and first.cold and second.cold


def test_a_part_of_what_shares_memory_is_dropped(evicting: Store) -> None:
    """Where there is no tier below: what one object has alone, while the other one is held."""
    evicting.tiers = ()
    first = evicting.add("f(1)", "shared", "own")
    evicting.add("f(2)", "shared", "other", holders="b")
    evicting.ask(100)
    assert evicting.dropped == [first] and len(evicting.granted) == 1


def test_host_copies_of_what_is_there_are_dropped_first(evicting: Store) -> None:
    """Then what lies on the host goes to files."""
    cold, warm = evicting.add("f(1)", "one"), evicting.add("f(2)", "two", holders="a")
    evicting.copy(cold)
    evicting.store.evict([cold], "host")
    evicting.copy(warm)
    evicting.add("f(3)", "three")
    evicting.add("f(4)", "four")
    evicting.ask(200)
    assert evicting.store.copies.get("two", "host") is None
    assert evicting.named() == [(["f(3)"], "host"), (["f(1)"], "file")]
    evicting.end_move()
    evicting.end_move()
    assert evicting.named() == [(["f(4)"], "host")] and cold.tier == "file"
    evicting.end_move()
    assert len(evicting.granted) == 1 and evicting.store.copies.nbytes("host") == 200


def test_stale_copies_are_dropped_where_the_host_has_little_left(refusing: Store) -> None:
    """Those that were used last come last, and so many as are needed; not good ones, nor those of what is cold."""
    spared, good, cold, first, second = (refusing.add(f"f({name})", name) for name in ("spared", "good", "cold", "1", "2"))
    for stored in (spared, good, cold, first, second):
        refusing.copy(stored)
    refusing.store.evict([cold], "host")
    for stored in (spared, first, second):
        for segment in stored.record.segments:
            copy = refusing.store.copies.get(segment.info.id, "host")
            assert copy is not None
            copy.revision = STALE
    first.last_accessed_at += 1
    assert not refusing.room.drop_stale_copies(0, [spared])
    assert refusing.room.drop_stale_copies(1, [spared])
    assert [refusing.store.copies.get(name, "host") is None for name in ("1", "2")] == [False, True]
    assert refusing.room.drop_stale_copies(1000, [spared])
    assert refusing.store.copies.nbytes("host") == 300
    assert not refusing.room.drop_stale_copies(1000, [spared])


def test_a_request_to_evict_has_room_or_not(refusing: Store) -> None:
    """Copies of what is on its device are dropped for it, but its own; what lies on the host stays there."""
    own, warm, cold = (refusing.add(f"f({name})", name) for name in ("own", "warm", "cold"))
    refusing.copy(warm)
    refusing.copy(cold)
    refusing.store.evict([cold], "host")
    with pytest.raises(ServerBusy, match=r"200 bytes of host copies do not fit: the limit \(--host-quota, .*\) is 200"):
        refusing.room.require_host(200, [own])
    assert refusing.store.copies.get("warm", "host") is not None
    with pytest.raises(ServerBusy):
        refusing.room.require_copies(1, 100)
    with pytest.raises(ServerBusy):
        refusing.room.require_host(100, [warm])
    refusing.room.require_host(100, [own])
    assert refusing.store.copies.get("warm", "host") is None
    refusing.room.require_copies(1, 100)


@pytest.mark.parametrize("kind", ["refusing", "evicting"])
def test_host_copies_that_are_being_made_count(kind: str, request: pytest.FixtureRequest) -> None:
    """No second request has the room that is reserved for the first one's copies."""
    store: Store = request.getfixturevalue(kind)
    stored = store.add("f(1)", "one")
    store.reserved = 150
    with pytest.raises(ServerBusy, match="150 are in use or reserved"):
        store.room.require_host(100, [stored])
    with pytest.raises(ServerBusy):
        store.room.require_copies(1, 100)
    store.room.require_host(50, [stored])


def test_host_copies_of_ordered_moves_count(evicting: Store) -> None:
    """A request has none of the room in which the line of requests puts others."""
    first, second = evicting.add("f(1)", "one", "two"), evicting.add("f(2)", "three")
    evicting.ask(200)
    assert evicting.named() == [(["f(1)"], "host")]
    with pytest.raises(ServerBusy, match="200 are in use or reserved"):
        evicting.room.require_host(100, [second])
    evicting.end_move()
    assert first.cold and evicting.store.copies.nbytes("host") == 200


def test_an_ordered_move_waits_for_reserved_room(evicting: Store) -> None:
    """It begins when a request's copies need no room any more."""
    evicting.tiers = ("host",)
    evicting.add("f(1)", "one", "two")
    evicting.reserved = 100
    evicting.ask(200)
    assert evicting.moves == []
    evicting.reserved = 0
    evicting.room.expire()
    assert evicting.named() == [(["f(1)"], "host")]
