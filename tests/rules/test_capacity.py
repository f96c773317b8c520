"""The rules of capacity: the order of requests, and the choice of evictions. Nothing is copied; the test sets the clock."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared_rpc.errors import CapabilityError, ServerBusy, SharedRPCError
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.records import Record
from shared_rpc.protocol.records import EMPTY_TABLE, SegmentInfo, Tier
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server import capacity
from shared_rpc.server.capacity import HOST, Capacity, Reservation
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.state.tiers import STALE
from tests.rules.test_store import Shelf, record_of, segment_of

GPU, CPU = "GPU-1", "cpu"
PLACES: tuple[Tier, ...] = ("device", "host", "file")


class Move(capacity.Move):
    """A move of the model, which ends on the test's command."""

    def __init__(self, group: Sequence[StoredObject], to: Tier) -> None:
        super().__init__(list(group), to, "up" if to == "device" else "down")
        self.begun = False
        self.ends = asyncio.Event()
        self.failure = ""

    @property
    def names(self) -> list[str | None]:
        """The keys of its objects."""
        return [stored.cache_key for stored in self.group]


class Ask:
    """A request of the model: granted, refused, or in the queue."""

    def __init__(self, session: str, sizes: dict[str, int], stored: StoredObject | None) -> None:
        self.session, self.sizes, self.stored = session, sizes, stored
        self.granted = self.there = False
        self.error: Exception | None = None
        self.done = asyncio.Event()
        self.task: asyncio.Task[None]


class World(Shelf):
    """Objects, a mover whose moves end on the test's command, and their capacity. A session is a letter."""

    def __init__(self, limits: dict[str, int], host_limit: int | None = None, **options: Any) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.capacity = Capacity(
            self.store,
            self.leases,
            self.clock,
            lambda seconds: None,
            ord,
            limits,
            **{"when_full": "evict", "host_quota": host_limit, **options},
        )
        self.capacity.below, self.capacity.begin_eviction = self.below, self.begin_eviction
        self.limits = limits
        self.tiers: dict[str, tuple[Tier, ...]] = {}
        self.asked: list[Ask] = []

    def close(self) -> None:
        """End everything."""
        for ask in self.asked:
            ask.task.cancel()
        self.turn()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.turn()
        self.loop.close()
        for stored in self.store:
            for session in self.leases.holders(stored.object_id):
                while self.leases.release(session, stored.object_id):
                    pass
        self.store.clear()

    # Moves.

    @property
    def moves(self) -> list[Any]:
        """The active moves, in order."""
        return list(dict.fromkeys(self.capacity.moves.values()))

    def begin(self, move: Move) -> None:
        """Register a move."""
        self.capacity.moves.update((stored.object_id, move) for stored in move.group)

    def finish(self, move: Move) -> None:
        """Forget a move."""
        for stored in move.group:
            del self.capacity.moves[stored.object_id]

    def users(self, stored: StoredObject) -> Sequence[str]:
        """Return the sessions that have it active."""
        return sorted(self.leases.active(stored.object_id))

    def below(self, group: Sequence[StoredObject]) -> tuple[Tier, ...]:
        """Return its copies, as set by the test."""
        tiers = self.tiers.get(group[0].object_id, ("host", "file"))
        return tuple(to for to in tiers if PLACES.index(to) > PLACES.index(group[0].tier))

    def begin_eviction(self, group: Sequence[StoredObject], to: Tier) -> None:
        """Begin a move."""
        for stored in group:
            assert (
                not self.users(stored) and not stored.pinned and to in self.below(group) and not self.capacity.move_of(stored)
            )
        move = Move(group, to)
        new = 0
        for info in self.infos(group):
            copy = self.store.copies.get(info.id, "host")
            if not group[0].cold:
                move.frees[info.device] += info.nbytes
            if to == "file" and copy is not None:
                move.frees[HOST] += info.nbytes
            new += info.nbytes if to == "host" and copy is None else 0
        self.begin(move)
        self.loop.create_task(self.lower(move, new))

    async def lower(self, move: Move, new: int) -> None:
        """Move a group down."""
        try:
            with await self.capacity.request(None, {HOST: new}, patient=False).wait():
                move.begun = True
                await move.ends.wait()
                if move.failure:
                    raise CapabilityError(move.failure)
                for info in self.infos(move.group):
                    if self.store.copies.get(info.id, move.to) is None:
                        self.store.copies.add(info, LowerCopy(segment_of(info), move.to))
                self.store.evict(move.group, move.to)
            self.finish(move)
        except SharedRPCError as error:
            self.finish(move)
            self.capacity.failed(move.group, error)
        move.over.set()
        self.capacity.changed()

    async def restore(self, move: Move, reservation: Reservation) -> None:
        """Move an object up."""
        with reservation:
            await move.ends.wait()
            if not move.failure and self.store.get(move.group[0].object_id):
                self.store.warm(move.group, [segment_of(info) for info in self.infos(move.group)])
        self.finish(move)
        move.over.set()
        self.capacity.changed()

    # Actions.

    def infos(self, group: Sequence[StoredObject]) -> list[SegmentInfo]:
        """Return the segments of a group, each once."""
        return list({one.info.id: one.info for stored in group for one in stored.record.segments}.values())

    def turn(self, do: Callable[[], Any] = lambda: None) -> Any:
        """Perform an action on the loop, and everything that follows from it."""

        async def play() -> Any:
            done = do()
            for _ in range(12):
                await asyncio.sleep(0)
            return done

        return self.loop.run_until_complete(play())

    def put(
        self,
        name: str,
        sizes: dict[str, int],
        place: Tier = "device",
        *,
        below: tuple[Tier, ...] = ("host", "file"),
        active: str = "",
        ready: bool = False,
        pinned: bool = False,
    ) -> StoredObject:
        """Add an object in a given tier."""
        self.clock.time += 1.0
        segments = [segment_of(SegmentInfo(f"{name}-{device}", nbytes, device)) for device, nbytes in sizes.items()]
        record = Record(b"", EMPTY_TABLE, segments, sum(sizes.values()))
        stored = self.store.add(EndpointSpec("f", pinned=pinned), name, record)
        self.tiers[stored.object_id] = below
        for session in active:
            self.leases.grant(session, stored.object_id)
        self.store.settle(stored.object_id)
        for tier in {*(["host"] if ready else []), *([place] if place != "device" else [])}:
            self.copy(stored, tier)
        if place != "device":
            self.store.evict([stored], place)
        return stored

    def copy_of(self, stored: StoredObject) -> LowerCopy | None:
        """Return the copy of an object's first segment on the host."""
        return self.store.copies.get(stored.record.segments[0].info.id, "host")

    def copy(self, stored: StoredObject, tier: Tier = "host") -> None:
        """Give an object copies."""
        for one in stored.record.segments:
            self.store.copies.add(one.info, LowerCopy(segment_of(one.info), tier))

    def spoil(self, stored: StoredObject) -> None:
        """Make an object's copy stale."""
        copy = self.copy_of(stored)
        assert copy is not None
        copy.revision = STALE

    def ask(self, session: str, stored: StoredObject | None = None, *, first: bool = False, **sizes: int) -> Ask:
        """Request an object for a session, or capacity: ``cpu=10, gpu=20``."""
        named = {{"gpu": GPU}.get(device, device): nbytes for device, nbytes in sizes.items()}
        ask = Ask(session, named, stored)
        self.asked.append(ask)

        async def want() -> None:
            try:
                if stored is None:
                    with await self.capacity.request(ask, named, first=first).wait():
                        ask.granted = True
                        await ask.done.wait()
                else:
                    await self.use(ask, stored)
            except SharedRPCError as error:
                ask.error = error

        ask.task = self.turn(lambda: self.loop.create_task(want()))
        return ask

    async def use(self, ask: Ask, stored: StoredObject) -> None:
        """Bring an object to its devices, and use it."""
        reservation = await self.capacity.request(ask, {}, stored).wait()
        ask.granted = True
        move = self.capacity.move_of(stored)
        if stored.cold and move is None and self.store.get(stored.object_id):
            move = Move(self.store.group(stored), "device")
            self.begin(move)
            self.loop.create_task(self.restore(move, reservation))
        else:
            assert not reservation._taken
        if move is not None:
            await move.over.wait()
        if self.store.get(stored.object_id) and not stored.cold:
            ask.there = True
            self.leases.grant(ask.session, stored.object_id)

    def leave(self, ask: Ask) -> None:
        """Withdraw a request at its deadline, or release reserved memory to the object made of it."""
        self.asked.remove(ask)
        self.turn(ask.task.cancel)

    def suspend(self, session: str, stored: StoredObject) -> None:
        """Suspend an object in a session."""
        self.clock.time += 1.0
        stored.last_accessed_at = self.clock.time
        self.turn(lambda: (self.leases.suspend(session, stored.object_id), self.capacity.changed()))

    def end(self, move: Move | None = None, error: str = "") -> None:
        """End a move, the first one by default."""
        move = move or self.moves[0]
        move.failure = error
        self.turn(move.ends.set)

    def expire(self) -> float | None:
        """Run the sweeper."""
        return self.turn(self.capacity.expire)

    @property
    def going(self) -> list[tuple[list[str | None], str]]:
        """The pending moves, by keys."""
        return [(move.names, move.to) for move in self.moves]


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    """``worlds(limits, host_limit)`` makes a world."""
    made: list[World] = []

    def make(*args: Any, **options: Any) -> World:
        made.append(World(*args, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(worlds: Callable[..., World]) -> World:
    """A GPU with capacity for a hundred bytes, and a host with capacity for a hundred."""
    return worlds({GPU: 100, CPU: 100})


def test_a_request_that_fits_is_granted_at_once(world: World) -> None:
    """Its bytes are reserved while the block runs."""
    ask = world.ask("a", gpu=60)
    assert ask.granted and world.capacity.used(GPU) == 60
    world.turn(ask.done.set)
    assert world.capacity.used(GPU) == 0


def test_the_least_recently_used_are_evicted(world: World) -> None:
    """As many as necessary, and the request is granted when they are."""
    *_, last = (world.put(name, {GPU: 30}) for name in "xyz")
    ask = world.ask("a", gpu=50)
    assert world.going == [(["x"], "host"), (["y"], "host")] and not ask.granted
    world.end()
    world.end()
    assert ask.granted and last.tier == "device"


def test_nothing_is_evicted_if_all_is_not_enough(world: World) -> None:
    """The rest is in use."""
    world.put("x", {GPU: 30})
    used = world.put("y", {GPU: 60}, active="b")
    ask = world.ask("a", gpu=60)
    assert world.moves == [] and not ask.granted
    world.suspend("b", used)
    assert world.going == [(["x"], "host"), (["y"], "host")]


def test_bytes_of_pending_evictions_are_counted(world: World) -> None:
    """If pending evictions suffice, no further ones begin."""
    world.put("x", {GPU: 60})
    world.put("y", {GPU: 40})
    world.ask("a", gpu=50)
    world.ask("b", cpu=10)
    assert world.going == [(["x"], "host")]


def test_objects_that_requests_wait_for_are_evicted_last(world: World) -> None:
    """Otherwise they would have to be restored at once."""
    first = world.put("x", {GPU: 50}, active="b")
    second = world.put("y", {GPU: 50}, active="b")
    cold = world.put("z", {GPU: 50}, "file")
    world.ask("a", cold)
    world.ask("c", first)
    world.leases.suspend("b", first.object_id)
    world.suspend("b", second)
    assert world.going == [(["y"], "host")]


def test_objects_without_a_lower_tier_are_dropped(world: World) -> None:
    """If only the cache lists them; held ones stay."""
    held = world.put("x", {GPU: 50}, below=(), active="b")
    world.suspend("b", held)
    listed = world.put("y", {GPU: 50}, below=())
    assert world.ask("a", gpu=50).granted and world.dropped == [listed]


def test_pinned_objects_stay(world: World) -> None:
    """Others are evicted instead; the pinned one is not dropped either."""
    world.put("x", {GPU: 50}, below=(), pinned=True)
    world.put("y", {GPU: 50})
    world.ask("a", gpu=50)
    assert world.going == [(["y"], "host")] and world.dropped == []


def test_refusing_servers_drop_unpinned_objects_without_holders(worlds: Callable[..., World]) -> None:
    """The least recently used first, as many as necessary, if that suffices, although they could be moved."""
    world = worlds({GPU: 200}, when_full="refuse")
    world.put("pinned", {GPU: 50}, pinned=True)
    world.put("held", {GPU: 50}, active="b")
    late, early = (world.put(name, {GPU: 50}) for name in ("late", "early"))
    world.store.lookup("late")
    with pytest.raises(ServerBusy, match="101 bytes on GPU-1 do not fit"):
        world.capacity.take({GPU: 101})
    assert world.dropped == []
    with world.capacity.take({GPU: 50}):
        assert world.dropped == [early] and world.going == []
        with world.capacity.take({GPU: 50}):
            assert world.dropped == [early, late]


def test_a_server_that_refuses_drops_an_object_that_is_copied_ahead(worlds: Callable[..., World]) -> None:
    """The copy ends by itself."""
    world = worlds({GPU: 100}, when_full="refuse")
    idle = world.put("idle", {GPU: 100})
    world.begin_eviction([idle], "host")
    with world.capacity.take({GPU: 50}):
        assert world.dropped == [idle]


def test_a_restore_reserves_memory_without_a_quota_too(worlds: Callable[..., World]) -> None:
    """In a server that refuses: a buffer is compared with what is left of the device."""
    world = worlds({}, when_full="refuse")
    cold = world.put("cold", {GPU: 60}, "host")
    with world.capacity.request("a", {}, cold):
        with pytest.raises(ServerBusy, match="50 bytes"):
            world.capacity.take({GPU: 50}, {GPU: 100})
        world.capacity.take({GPU: 40}, {GPU: 100}).release()


@pytest.mark.parametrize(
    ("nbytes", "kind", "text"),
    [
        (51, ServerBusy, "51 bytes on GPU-1 exceed the quota left by pinned objects"),
        (101, CapabilityError, "more than the quota"),
    ],
)
def test_impossible_requests_are_refused_before_their_turn(world: World, nbytes: int, kind: type[Exception], text: str) -> None:
    """Regardless of earlier requests in the queue."""
    world.put("x", {GPU: 50}, pinned=True)
    world.put("y", {GPU: 50}, active="b")
    world.ask("a", gpu=50)
    refused = world.ask("c", gpu=nbytes)
    assert isinstance(refused.error, kind) and text in str(refused.error) and len(world.capacity) == 1


def test_requests_are_served_in_order(world: World) -> None:
    """A small one that would fit waits behind a large one, but not one for another device."""
    used = world.put("x", {GPU: 60}, active="b")
    large, small, other = world.ask("a", gpu=90), world.ask("c", gpu=10), world.ask("d", cpu=10)
    assert [each.granted for each in (large, small, other)] == [False, False, True]
    world.suspend("b", used)
    world.end()
    assert large.granted and small.granted


def test_requests_for_two_devices_block_both(world: World) -> None:
    """They would starve otherwise."""
    world.put("x", {GPU: 60}, active="b")
    both, other = world.ask("a", gpu=60, cpu=10), world.ask("c", cpu=10)
    assert not both.granted and not other.granted


def test_objects_in_use_become_idle(world: World) -> None:
    """While another one is waited for, later users of the object queue too, and get it when it is restored."""
    one, two = world.put("x", {GPU: 100}, active="b"), world.put("y", {GPU: 100}, "host")
    first, second = world.ask("a", two), world.ask("c", one)
    assert world.capacity.must_wait("d", one) and not world.capacity.must_wait("b", one) and not second.granted
    world.suspend("b", one)
    world.end()
    world.end()
    assert first.there and not second.granted
    world.suspend("a", two)
    world.end()
    world.end()
    assert second.there


def test_all_requests_for_an_object_are_granted_together(world: World) -> None:
    """With the first of them, including later ones in the queue; subsequent requests queue again."""
    one, two = world.put("x", {GPU: 100}, active="s"), world.put("y", {GPU: 100}, "host")
    first, other, third = world.ask("a", two), world.ask("b", one), world.ask("c", two)
    world.suspend("s", one)
    world.end()
    late = world.ask("d", two)
    assert [each.granted for each in (first, other, third, late)] == [True, False, True, False]
    world.end()
    assert world.leases.active(two.object_id) == {"a", "c"}


def test_restores_are_joined(world: World) -> None:
    """Their bytes are reserved once; a failed one is retried by the next request, with a new reservation."""
    stored = world.put("x", {GPU: 80}, "host")
    world.ask("a", stored)
    world.end(error="a GPU is gone")
    assert world.capacity.used(GPU) == 0
    asks = [world.ask("a", stored), world.ask("b", stored)]
    assert world.capacity.used(GPU) == 80 and len(world.moves) == 1
    world.end()
    assert all(ask.there for ask in asks) and world.capacity.used(GPU) == 80


def test_cancelled_moves_stop_copying() -> None:
    """Not only the move that follows the copy."""
    move = Move([], "file")
    move.copying = Mock()
    move.cancel()
    assert move.cancelled and move.copying.cancel.called


def test_cancelled_requests_block_no_other(world: World) -> None:
    """The next one is served at once."""
    world.put("x", {GPU: 60}, active="b")
    large, small = world.ask("a", gpu=90), world.ask("c", gpu=10)
    why = world.capacity.why(small)
    assert "of f(), which pid 98 uses" in why and "1 requests are before this one" in why
    world.leave(large)
    assert small.granted and len(world.capacity) == 0


def test_failed_moves_are_retried_later(world: World) -> None:
    """Another object is evicted in the meantime. Waiting requests report the reason."""
    world.put("x", {GPU: 50})
    world.put("y", {GPU: 50})
    ask = world.ask("a", gpu=50)
    world.end(error="the disk is full")
    assert world.going == [(["y"], "host")] and "could not be moved: the disk is full" in world.capacity.why(ask)
    world.end(error="the disk is full")
    assert world.moves == [] and world.expire() == 5.0
    world.clock.time += 5.0
    assert world.expire() is None and world.going == [(["x"], "host")]


def test_calls_of_running_endpoints_go_first(world: World) -> None:
    """Because the others may wait for memory that the endpoint uses."""
    world.put("x", {GPU: 60}, active="b")
    world.ask("a", gpu=90)
    assert world.ask("c", first=True, gpu=40).granted


def test_impatient_requests_are_refused(world: World) -> None:
    """If evicting everything would not suffice."""
    world.put("x", {GPU: 60}, active="b")

    async def ask() -> None:
        with await world.capacity.request(None, {GPU: 50}, patient=False).wait():
            pass

    with pytest.raises(ServerBusy):
        world.loop.run_until_complete(ask())


# Host copies.


def test_copies_of_objects_on_their_device_are_freed_first(worlds: Callable[..., World]) -> None:
    """They are dropped; objects in the host tier stay."""
    world = worlds({GPU: 100}, host_limit=100)
    world.put("cold", {GPU: 50}, "host")
    warm = world.put("warm", {GPU: 50}, ready=True, active="b")
    world.put("x", {GPU: 50})
    world.ask("a", gpu=50)
    assert world.copy_of(warm) is None and world.going == [(["x"], "host")]


def test_stale_copies_are_dropped_before_good_ones(worlds: Callable[..., World]) -> None:
    """Although their objects were used later."""
    world = worlds({}, host_limit=200, when_full="refuse")
    good, stale = (world.put(name, {GPU: 100}, ready=True) for name in ("good", "stale"))
    world.spoil(stale)
    with world.capacity.take({HOST: 100}):
        assert world.copy_of(good) is not None and world.copy_of(stale) is None


def test_host_copies_are_spilled_to_files(worlds: Callable[..., World]) -> None:
    """The least recently used first; the object is evicted once there is capacity for its copy."""
    world = worlds({GPU: 50}, host_limit=100)
    for name in ("old", "new"):
        world.put(name, {GPU: 50}, "host")
    world.put("x", {GPU: 50})
    world.ask("a", gpu=50)
    waiting, going = world.moves
    assert (waiting.names, waiting.begun, going.names, going.to) == (["x"], False, ["old"], "file")
    world.end(going)
    assert world.going == [(["x"], "host")] and waiting.begun


@pytest.mark.parametrize(
    ("sizes", "below", "going"),
    [
        ([100], ("host", "file"), [(["0"], "file")]),
        ([50, 50], ("host", "file"), [(["0"], "host"), (["1"], "file")]),
        ([50, 50], ("host",), []),
    ],
    ids=["larger than the host", "the second of two", "nowhere for the second"],
)
def test_objects_that_do_not_fit_on_the_host_go_to_files(
    worlds: Callable[..., World], sizes: list[int], below: tuple[Tier, ...], going: list[Any]
) -> None:
    """If there is no lower capacity for all of them, none is moved: the first alone would not help."""
    world = worlds({GPU: 100}, host_limit=50)
    for number, nbytes in enumerate(sizes):
        world.put(str(number), {GPU: nbytes}, below=below)
    world.ask("a", gpu=100)
    assert world.going == going


def test_copies_of_evicted_objects_are_kept(worlds: Callable[..., World]) -> None:
    """They make the eviction cheap; another copy is dropped."""
    world = worlds({GPU: 150}, host_limit=100)
    world.put("x", {GPU: 50})
    kept, dropped = (world.put(name, {GPU: 50}, ready=True) for name in "yz")
    world.ask("a", gpu=100)
    assert world.going == [(["x"], "host"), (["y"], "host")]
    assert world.copy_of(kept) is not None and world.copy_of(dropped) is None


def test_stale_copies_are_dropped_when_the_host_is_short(worlds: Callable[..., World]) -> None:
    """The least recently used first, as many as necessary; not good ones, nor those of cold objects."""
    world = worlds({}, when_full="refuse")
    _good, first, second = (world.put(name, {GPU: 100}, ready=True) for name in ("good", "1", "2"))
    world.put("cold", {GPU: 100}, "host")
    for one in (first, second):
        world.spoil(one)
    first.last_accessed_at = world.clock.time + 1
    drop = world.capacity.drop_stale_copies
    assert not drop(0) and drop(1)
    assert world.copy_of(first) is not None and world.copy_of(second) is None
    assert drop(1000) and world.store.copies.nbytes("host") == 200 and not drop(1000)


def test_requested_evictions_do_not_wait_for_host_memory(worlds: Callable[..., World]) -> None:
    """They drop copies of warm objects; objects in the host tier stay."""
    world = worlds({}, host_limit=200, when_full="refuse")
    world.put("warm", {GPU: 100}, ready=True)
    world.put("cold", {GPU: 100}, "host")
    take, has = world.capacity.take, world.capacity.has_host
    with pytest.raises(ServerBusy, match=r"200 bytes of host copies do not fit: the limit \(--host-quota, .*\) is 200"):
        take({HOST: 200})
    assert has(0) and not has(1)
    with take({HOST: 100}):
        assert world.store.copies.nbytes("host") == 100
        with pytest.raises(ServerBusy, match="200 are in use or reserved"):
            take({HOST: 1})
    assert has(100)


# Objects that share memory.


def shared(world: World, *keys: str, **holders: str) -> list[StoredObject]:
    """Return objects over a hundred common bytes, each with a hundred of its own."""
    found = []
    for key in keys:
        found.append(world.add(key, "shared", f"own of {key}", holders=holders.get(key, "")))
    return found


def test_objects_that_share_memory_are_evicted_together(worlds: Callable[..., World]) -> None:
    """If none of them is in use."""
    world = worlds({CPU: 300})
    first, second = shared(world, "x", "y", x="a", y="b")
    ask = world.ask("c", cpu=300)
    world.suspend("a", first)
    assert world.moves == []
    world.suspend("b", second)
    assert world.going == [(["x", "y"], "host")]
    world.end()
    assert ask.granted and first.cold and second.cold


def test_records_need_only_additional_memory(world: World) -> None:
    """A part of an existing object needs neither bytes nor descriptors."""
    world.add("f(1)", "one", "two", holders="a")
    for names, needs in ((("one", "two"), ({}, 0)), (("one", "three"), ({"cpu": 100}, 1))):
        record = record_of(*names)
        assert world.capacity.needs_of(record) == needs
        record.close()


# Any order of actions.

NAMES = st.sampled_from([f"o{number}" for number in range(6)])
SESSIONS = st.sampled_from("abcd")
SIZES = st.dictionaries(st.sampled_from(["gpu", "cpu", "other"]), st.integers(1, 60), min_size=1, max_size=2)
BELOW = st.sampled_from([(), ("host",), ("file",), ("host", "file")])

T = TypeVar("T")


def one_of(found: Sequence[T], number: int) -> T:
    """Choose an item by a number drawn by a rule."""
    return found[number % len(found)]


class CapacityModel(RuleBasedStateMachine):
    """Capacity with a slow mover that may fail, and sessions that begin and end in any order."""

    world: World

    @initialize(gpu=st.integers(30, 120), cpu=st.integers(30, 120), host=st.none() | st.integers(0, 150))
    def start(self, gpu: int, cpu: int, host: int | None) -> None:
        """Start with empty devices."""
        self.host = host
        self.world = World({GPU: gpu, CPU: cpu}, host)

    def thing(self, name: str) -> StoredObject | None:
        """Return the object of a name."""
        return next((stored for stored in self.world.store if stored.cache_key == name), None)

    @property
    def making(self) -> list[Ask]:
        """Granted requests for memory."""
        return [ask for ask in self.world.asked if ask.granted and ask.stored is None]

    @property
    def waiting(self) -> list[Ask]:
        """Queued requests."""
        return [ask for ask in self.world.asked if not ask.granted and ask.error is None]

    @property
    def used(self) -> list[StoredObject]:
        """Objects in use."""
        return [stored for stored in self.world.store if self.world.users(stored)]

    @rule(session=SESSIONS, sizes=SIZES)
    def ask_for_memory(self, session: str, sizes: dict[str, int]) -> None:
        """Request memory for a buffer, or a result."""
        self.world.ask(session, **sizes)

    @rule(session=SESSIONS, name=NAMES)
    def ask_for_an_object(self, session: str, name: str) -> None:
        """Request an object that the session does not use yet."""
        stored = self.thing(name)
        if stored is not None and session not in self.world.users(stored):
            self.world.ask(session, stored)

    @rule(name=NAMES, sizes=SIZES, below=BELOW, pinned=st.sampled_from([False, False, False, True]))
    def recover_an_earlier_one(self, name: str, sizes: dict[str, int], below: tuple[Tier, ...], pinned: bool) -> None:
        """Add an object that is in a lower tier from the beginning."""
        fits = below[-1:] != ("host",) or self.host is None or self.world.capacity.used(HOST) + sum(sizes.values()) <= self.host
        if self.thing(name) is None and below and fits:
            named = {{"gpu": GPU}.get(device, device): nbytes for device, nbytes in sizes.items()}
            self.world.turn(lambda: self.world.put(name, named, below[-1], below=below, pinned=pinned))

    @precondition(lambda self: self.making)
    @rule(
        number=st.integers(0, 9),
        name=NAMES,
        holder=st.sampled_from(["", *"abcd"]),
        below=BELOW,
        pinned=st.sampled_from([False, False, True]),
        fails=st.booleans(),
    )
    def make(self, number: int, name: str, holder: str, below: tuple[Tier, ...], pinned: bool, fails: bool) -> None:
        """Make an object of reserved memory, or fail to."""
        ask = one_of(self.making, number)
        if self.thing(name) is None and not fails:
            self.world.put(name, ask.sizes, below=below, pinned=pinned, active=holder)
        self.world.leave(ask)

    @precondition(lambda self: self.used)
    @rule(number=st.integers(0, 9))
    def suspend(self, number: int) -> None:
        """Suspend an object in a session."""
        stored = one_of(self.used, number)
        self.world.suspend(self.world.users(stored)[0], stored)

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 9))
    def leave(self, number: int) -> None:
        """Withdraw a request at its deadline."""
        self.world.leave(one_of(self.waiting, number))

    @precondition(lambda self: any(move.begun or move.direction == "up" for move in self.world.moves))
    @rule(number=st.integers(0, 9), fails=st.sampled_from([False, False, True]))
    def end_a_move(self, number: int, fails: bool) -> None:
        """End a move, successfully or for lack of space."""
        begun = [move for move in self.world.moves if move.begun or move.direction == "up"]
        self.world.end(one_of(begun, number), "no space left on device" if fails else "")

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        """Let time pass, and run the sweeper."""
        self.world.clock.time += seconds
        self.world.expire()

    @invariant()
    def quotas_are_kept(self) -> None:
        """The sums of used and reserved bytes are within the quotas, on the devices and on the host."""
        if not hasattr(self, "world"):
            return
        for device, limit in self.world.limits.items():
            assert self.world.capacity.used(device) <= limit
        assert self.host is None or self.world.capacity.used(HOST) <= self.host

    @invariant()
    def no_request_waits_for_nothing(self) -> None:
        """The first request in the queue lacks memory, or waits for the eviction of its own object."""
        if not hasattr(self, "world") or not self.waiting:
            return
        world, first = self.world, self.waiting[0]
        sizes = first.sizes
        if first.stored is not None:
            assert world.store.get(first.stored.object_id) is not None
            if (move := world.capacity.move_of(first.stored)) is not None and move.direction == "down":
                return
            assert first.stored.cold
            sizes = {one.info.device: one.info.nbytes for one in first.stored.record.segments}
        limits = world.limits
        assert any(
            nbytes > limits[device] - world.capacity.used(device) for device, nbytes in sizes.items() if device in limits
        )

    @invariant()
    def no_request_is_lost(self) -> None:
        """Every waiting request is in the queue."""
        if hasattr(self, "world"):
            assert len(self.world.capacity) == len(self.waiting)

    def teardown(self) -> None:
        """Once all sessions have suspended their objects, and moves have succeeded, every request is served."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.capacity._host_limit = None
        world.turn(lambda: world.capacity.set_limits(world.limits))
        for _ in range(1000):
            if not self.waiting:
                break
            world.clock.time += 6.0
            world.expire()
            for stored in self.used:
                for session in world.users(stored):
                    world.suspend(session, stored)
            for stored in list(world.store):
                if not world.tiers.get(stored.object_id) and not world.capacity.move_of(stored):
                    for session in world.leases.holders(stored.object_id):
                        world.leases.release(session, stored.object_id)
            world.turn(world.capacity.changed)
            for ask in self.making:
                world.leave(ask)
            for move in list(world.moves):
                world.end(move)
        waiting = self.waiting
        world.close()
        assert waiting == []


TestCapacityModel = CapacityModel.TestCase
TestCapacityModel.settings = settings(stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(10))
def test_sessions_that_alternate_between_two_objects_make_progress(worlds: Callable[..., World], seed: int) -> None:
    """With capacity for one object, whichever session is slow: none waits for more than two changes of the object."""
    world, chance = worlds({GPU: 100}), random.Random(seed)
    things = {name: world.put(name, {GPU: 100}, place) for name, place in (("x", "host"), ("y", "file"))}
    wanted = {
        session: itertools.islice(itertools.cycle("xy" if number % 2 else "yx"), 6)
        for number, session in enumerate("abcdefghij")
    }
    asks: dict[str, tuple[Ask, int]] = {}
    finished: set[str] = set()
    restored = 0
    while len(finished) < len(wanted):
        before = sum(move.direction == "up" for move in world.moves)
        session = chance.choice(sorted(wanted.keys() - finished))
        using = [stored for stored in things.values() if session in world.users(stored)]
        if world.moves and chance.random() < 0.4:
            before -= world.moves[0].direction == "up"
            world.end()
        elif using:
            world.suspend(session, using[0])
        elif session not in asks or asks[session][0].there:
            name = next(wanted[session], "")
            if name:
                asks[session] = world.ask(session, things[name]), restored
            else:
                finished.add(session)
        restored += max(sum(move.direction == "up" for move in world.moves) - before, 0)
        for ask, since in asks.values():
            if ask.granted and not ask.done.is_set():
                ask.done.set()
                assert restored - since <= 2
    assert len(world.capacity) == 0
