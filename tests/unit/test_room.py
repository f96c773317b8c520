"""The rules of room on devices: whose turn it is, and what gives way. Nothing is moved here; the clock is the test's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared_rpc.server.state.room import (
    Below,
    DropCopies,
    Evictable,
    EvictObjects,
    Grant,
    HostCopies,
    Refuse,
    Reservation,
    RoomLine,
    RoomRequest,
    Whereabouts,
)
from tests.kit.clock import Clock

GPU, CPU = "GPU-1", "cpu"


@dataclass(eq=False)
class Thing:
    """An object of the model. ``place`` is where its bytes are, ``ready`` whether there is a good host copy of it."""

    name: str
    sizes: dict[str, int]
    below: tuple[Below, ...] = ("host", "file")
    place: str = "device"
    ready: bool = False
    pinned: bool = False
    listed: bool = True
    active: set[str] = field(default_factory=set)
    suspended: set[str] = field(default_factory=set)
    moving: bool = False
    used_at: float = 0.0

    @property
    def nbytes(self) -> int:
        """All its bytes."""
        return sum(self.sizes.values())

    @property
    def at_rest(self) -> bool:
        """Whether it may leave where it is."""
        return not (self.active or self.pinned or self.moving) and bool(self.below or (self.listed and not self.suspended))


@dataclass(eq=False)
class Restore:
    """An object on its way up, and who waits for it."""

    thing: Thing
    reservation: Reservation
    sessions: list[str]


class World:
    """The driver of a line, and the places of objects: an :class:`Occupancy`. Moves end when the test says so.

    A request's waiter is the name of its session.
    """

    def __init__(self, limits: dict[str, int], host_limit: int | None = None) -> None:
        self.clock = Clock()
        self.things: dict[str, Thing] = {}
        self.line: RoomLine[str] = RoomLine(self, self.clock, limits, host_limit)
        #: The requests in line, as the model has them.
        self.waiting: list[RoomRequest[str]] = []
        self.granted: list[RoomRequest[str]] = []
        self.refused: list[Refuse[str]] = []
        self.moves: list[EvictObjects] = []
        self.restores: list[Restore] = []
        self.making: list[Reservation] = []
        self.dropped: list[str] = []
        self.copies_dropped: list[str] = []

    # What the line asks.

    def used(self, device: str) -> int:
        """Return the bytes of what is there."""
        return sum(thing.sizes.get(device, 0) for thing in self.things.values() if thing.place == "device")

    def pinned(self, device: str) -> int:
        """Return the bytes of what is there and pinned."""
        return sum(thing.sizes.get(device, 0) for thing in self.things.values() if thing.place == "device" and thing.pinned)

    def whereabouts(self, object_id: str) -> Whereabouts | None:
        """Describe an object: all of it is there, or nothing."""
        thing = self.things.get(object_id)
        if thing is None:
            return None
        return Whereabouts(thing.sizes, {} if thing.place == "device" else thing.sizes)

    def evictable(self) -> Iterator[Evictable]:
        """Yield what is at rest."""
        for thing in self.by_use():
            if thing.place == "device" and thing.at_rest:
                ready = thing.nbytes if thing.ready else 0
                yield Evictable((thing.name,), thing.sizes, thing.below, thing.nbytes, ready)

    def host_used(self) -> int:
        """Return the bytes of copies, good ones all."""
        return sum(thing.nbytes for thing in self.things.values() if thing.place == "host" or thing.ready)

    def host_copies(self) -> Iterator[HostCopies]:
        """Yield them."""
        for thing in self.by_use():
            if thing.place == "device" and thing.ready and not thing.moving:
                yield HostCopies((thing.name,), thing.nbytes, cold=False)
            elif thing.place == "host" and "file" in thing.below and thing.at_rest:
                yield HostCopies((thing.name,), thing.nbytes, cold=True)

    def on_the_host(self) -> int:
        """Return the bytes of copies, and of those that are being made."""
        coming = (self.things[name] for move in self.moves if move.to == "host" for name in move.objects)
        return self.host_used() + sum(thing.nbytes for thing in coming if not thing.ready)

    def by_use(self) -> list[Thing]:
        """The objects, the least recently used first."""
        return sorted(self.things.values(), key=lambda thing: thing.used_at)

    # What happens.

    def put(self, name: str, sizes: dict[str, int], **facts: Any) -> Thing:
        """An object that lies somewhere."""
        self.clock.time += 1.0
        thing = self.things[name] = Thing(name, sizes, used_at=self.clock.time, **facts)
        return thing

    def ask(self, session: str, object_id: str = "", **sizes: int) -> RoomRequest[str]:
        """A session wants an object, or room: ``cpu=10, gpu=20``."""
        named = {{"gpu": GPU}.get(device, device): nbytes for device, nbytes in sizes.items()}
        request = RoomRequest(session, named, object_id)
        self.enter(request)
        return request

    def enter(self, request: RoomRequest[str]) -> None:
        """A request gets in line."""
        self.waiting.append(request)
        self.line.enter(request)
        self.pump()

    def leave(self, request: RoomRequest[str]) -> None:
        """The deadline of a waiter has passed."""
        assert self.line.leave(request)
        self.waiting.remove(request)
        self.pump()

    def suspend(self, session: str, name: str) -> None:
        """A session uses an object no more."""
        thing = self.things[name]
        thing.active.remove(session)
        thing.suspended.add(session)
        self.clock.time += 1.0
        thing.used_at = self.clock.time
        self.pump()

    def end_move(self, move: EvictObjects, error: str = "") -> None:
        """A move ends well, or not."""
        self.moves.remove(move)
        for name in move.objects:
            thing = self.things[name]
            thing.moving = False
            if not error:
                thing.place, thing.ready = move.to, False if move.to == "file" else thing.ready
                if move.to == "host":
                    thing.ready = True
        if error:
            self.line.failed(move.objects, error)
        else:
            self.line.moved(move.objects)
        self.pump()

    def end_restore(self, restore: Restore, *, arrives: bool = True) -> None:
        """An object is on its devices, or could not be brought there."""
        self.restores.remove(restore)
        self.line.redeem(restore.reservation)
        restore.thing.moving = False
        if arrives:
            restore.thing.ready = restore.thing.place == "host"
            restore.thing.place = "device"
            for session in restore.sessions:
                self.activate(restore.thing, session)
        self.pump()

    def activate(self, thing: Thing, session: str) -> None:
        """A session has what it asked for."""
        thing.suspended.discard(session)
        thing.active.add(session)

    def pump(self) -> None:
        """Carry out all there is to do."""
        while (decision := self.line.next()) is not None:
            if isinstance(decision, Grant):
                self.grant(decision)
            elif isinstance(decision, Refuse):
                self.waiting.remove(decision.request)
                self.refused.append(decision)
            elif isinstance(decision, EvictObjects):
                for name in decision.objects:
                    thing = self.things[name]
                    assert thing.at_rest and decision.to in thing.below
                    thing.moving = True
                self.moves.append(decision)
            elif isinstance(decision, DropCopies):
                for name in decision.objects:
                    thing = self.things[name]
                    assert thing.place == "device" and thing.ready and not thing.moving
                    thing.ready = False
                    self.copies_dropped.append(name)
            else:
                for name in decision.objects:
                    thing = self.things.pop(name)
                    assert thing.at_rest and not thing.below
                    self.dropped.append(name)

    def grant(self, grant: Grant[str]) -> None:
        """Serve requests: they get the object, wait for it together, or make memory."""
        for request in grant.requests:
            self.waiting.remove(request)
            self.granted.append(request)
        name = grant.requests[0].object_id
        sessions = [request.waiter for request in grant.requests]
        thing = self.things.get(name)
        under_way = [restore for restore in self.restores if restore.thing is thing]
        if not name:
            self.making += [grant.reservation] if grant.reservation is not None else []
        elif thing is None:
            return
        elif grant.reservation is not None:
            assert thing.place != "device" and not under_way and not thing.moving
            thing.moving = True
            self.restores.append(Restore(thing, grant.reservation, sessions))
        elif under_way:
            under_way[0].sessions += sessions
        else:
            assert not thing.moving
            for session in sessions:
                self.activate(thing, session)


@pytest.fixture
def world() -> World:
    """A GPU with room for a hundred bytes, and a host with room for a hundred."""
    return World({GPU: 100, CPU: 100})


def test_what_fits_is_granted_at_once(world: World) -> None:
    """Its bytes are set aside until they are an object's."""
    request = world.ask("a", gpu=60)
    assert world.granted == [request] and world.line.reserved(GPU) == 60
    world.line.redeem(world.making[0])
    world.line.redeem(world.making[0])
    assert world.line.reserved(GPU) == 0


def test_a_device_without_a_limit_has_room(world: World) -> None:
    """For everything, and nothing is set aside."""
    request = world.ask("a", disk=1 << 60)
    assert world.granted == [request] and world.making == []


def test_the_least_recently_used_give_way(world: World) -> None:
    """As many as are needed, and their room is granted when they have gone."""
    for name in "xyz":
        world.put(name, {GPU: 30})
    request = world.ask("a", gpu=50)
    assert [move.objects for move in world.moves] == [("x",), ("y",)] and world.granted == []
    for move in list(world.moves):
        world.end_move(move)
    assert world.granted == [request] and world.things["z"].place == "device"


def test_nothing_gives_way_where_all_is_not_enough(world: World) -> None:
    """It would be moved for nothing: somebody uses the rest."""
    world.put("x", {GPU: 30})
    world.put("y", {GPU: 60}, active={"b"})
    request = world.ask("a", gpu=60)
    assert world.moves == [] and world.waiting == [request]
    world.suspend("b", "y")
    assert [move.objects for move in world.moves] == [("x",), ("y",)]


def test_an_object_that_is_there_needs_no_room(world: World) -> None:
    """However full its device is, after the limit was lowered."""
    world.put("x", {GPU: 80})
    world.line.limits = {GPU: 50, CPU: 100}
    world.ask("a", "x")
    assert world.things["x"].active == {"a"}


def test_what_is_on_its_way_is_counted(world: World) -> None:
    """While something goes that is enough, nothing else has to."""
    world.put("x", {GPU: 60})
    world.put("y", {GPU: 40})
    world.ask("a", gpu=50)
    world.ask("b", cpu=10)
    assert [move.objects for move in world.moves] == [("x",)]


def test_what_somebody_waits_for_goes_last(world: World) -> None:
    """Else it would have to come back at once."""
    world.put("x", {GPU: 50})
    world.put("y", {GPU: 50}, active={"b"})
    world.put("z", {GPU: 50}, place="file")
    world.things["x"].active.add("b")
    world.ask("a", "z")
    world.ask("c", "x")
    world.things["x"].active.clear()
    world.suspend("b", "y")
    assert [move.objects for move in world.moves] == [("y",)]


def test_an_object_that_can_go_nowhere_is_dropped(world: World) -> None:
    """If only the cache lists it; one that a session holds stays."""
    world.put("x", {GPU: 50}, below=(), suspended={"b"})
    world.put("y", {GPU: 50}, below=())
    request = world.ask("a", gpu=50)
    assert world.dropped == ["y"] and world.granted == [request]


def test_pinned_objects_stay(world: World) -> None:
    """Others go for it."""
    world.put("x", {GPU: 50}, pinned=True)
    world.put("y", {GPU: 50})
    world.ask("a", gpu=50)
    assert [move.objects for move in world.moves] == [("y",)]


def test_what_has_no_room_beside_pinned_objects_is_refused(world: World) -> None:
    """At once: it would wait for ever."""
    world.put("x", {GPU: 50}, pinned=True)
    request = world.ask("a", gpu=51)
    assert world.refused == [Refuse(request, GPU, 51, 100, 50)]


def test_more_than_the_limit_is_refused_before_its_turn(world: World) -> None:
    """Whoever is in line before it."""
    world.put("x", {GPU: 100}, active={"b"})
    world.ask("a", gpu=50)
    refusal = world.line.refusal(RoomRequest("c", {GPU: 101}))
    assert refusal is not None and (refusal.nbytes, refusal.limit) == (101, 100)


def test_requests_are_served_in_order(world: World) -> None:
    """A small one that would fit waits behind a large one; another device's does not."""
    world.put("x", {GPU: 60}, active={"b"})
    large, small, other = world.ask("a", gpu=90), world.ask("c", gpu=10), world.ask("d", cpu=10)
    assert world.granted == [other]
    world.suspend("b", "x")
    world.end_move(world.moves[0])
    assert world.granted == [other, large, small]


def test_a_request_for_two_devices_holds_up_both(world: World) -> None:
    """It would be passed over for ever otherwise."""
    world.put("x", {GPU: 60}, active={"b"})
    both, other = world.ask("a", gpu=60, cpu=10), world.ask("c", cpu=10)
    assert world.waiting == [both, other]


def test_an_object_in_use_comes_to_rest(world: World) -> None:
    """While another is waited for, whoever wants it next stands in line too, and gets it when it is back."""
    world.put("x", {GPU: 100}, active={"b"})
    world.put("y", {GPU: 100}, place="host")
    first, second = world.ask("a", "y"), world.ask("c", "x")
    assert world.line.waits("x") and world.waiting == [first, second]
    world.suspend("b", "x")
    world.end_move(world.moves[0])
    world.end_restore(world.restores[0])
    assert world.granted == [first] and world.things["y"].active == {"a"}
    world.suspend("a", "y")
    world.end_move(world.moves[0])
    world.end_restore(world.restores[0])
    assert world.things["x"].active == {"c"}


def test_all_that_wait_for_an_object_get_it_together(world: World) -> None:
    """With the first of them, those behind others too; who comes later does not."""
    world.put("x", {GPU: 100}, active={"s"})
    world.put("y", {GPU: 100}, place="host")
    first, other, third = world.ask("a", "y"), world.ask("b", "x"), world.ask("c", "y")
    world.suspend("s", "x")
    world.end_move(world.moves[0])
    assert world.granted == [first, third]
    late = world.ask("d", "y")
    assert world.waiting == [other, late]
    world.end_restore(world.restores[0])
    assert world.things["y"].active == {"a", "c"}


def test_with_nobody_in_line_a_restore_is_joined(world: World) -> None:
    """Its bytes are set aside once."""
    world.put("x", {GPU: 80}, place="host")
    world.ask("a", "x")
    world.ask("b", "x")
    assert world.line.reserved(GPU) == 80 and world.restores[0].sessions == ["a", "b"]


def test_a_restore_that_failed_is_begun_again(world: World) -> None:
    """By the next one who asks; its bytes are set aside again."""
    world.put("x", {GPU: 80}, place="host")
    world.ask("a", "x")
    world.end_restore(world.restores[0], arrives=False)
    assert world.line.reserved(GPU) == 0
    world.ask("b", "x")
    assert world.line.reserved(GPU) == 80 and world.restores[0].sessions == ["b"]


def test_whoever_leaves_holds_nobody_up(world: World) -> None:
    """The next one's turn comes at once."""
    world.put("x", {GPU: 60}, active={"b"})
    large, small = world.ask("a", gpu=90), world.ask("c", gpu=10)
    assert world.line.ahead(small) == 1
    world.leave(large)
    assert world.granted == [small]
    assert not world.line.leave(large)


def test_an_object_on_its_way_down_is_waited_for(world: World) -> None:
    """It comes back from there; whoever it made room for has left."""
    world.put("x", {GPU: 100})
    request = world.ask("a", gpu=50)
    world.leave(request)
    world.ask("b", "x")
    assert world.waiting and world.restores == []
    world.end_move(world.moves[0])
    assert [restore.thing.name for restore in world.restores] == ["x"]


def test_a_failed_move_is_not_tried_again_at_once(world: World) -> None:
    """Something else goes; a while later the object may go again."""
    world.put("x", {GPU: 50})
    world.put("y", {GPU: 50})
    world.ask("a", gpu=50)
    world.end_move(world.moves[0], "the disk is full")
    assert [move.objects for move in world.moves] == [("y",)] and world.line.failures() == {"x": "the disk is full"}
    world.end_move(world.moves[0], "the disk is full")
    assert world.moves == [] and world.line.expire() == 5.0
    world.clock.time += 5.0
    assert world.line.expire() is None
    world.pump()
    assert [move.objects for move in world.moves] == [("x",)]


def test_a_turn_that_had_come_is_kept(world: World) -> None:
    """What was made is larger than what was set aside for it: the rest is asked for before all others."""
    world.put("x", {GPU: 60}, active={"b"})
    world.ask("a", gpu=90)
    again = RoomRequest("c", {GPU: 40})
    world.waiting.insert(0, again)
    world.line.enter(again, first=True)
    world.pump()
    assert world.granted == [again]


def test_an_object_that_is_gone_needs_no_room(world: World) -> None:
    """Whoever waits for it is told when its turn comes."""
    world.put("x", {GPU: 60}, place="host")
    world.put("y", {GPU: 100}, active={"b"})
    request = world.ask("a", "x")
    del world.things["x"]
    world.pump()
    assert world.granted == [request]


# Host copies.


def test_copies_of_what_is_on_its_device_make_room_first() -> None:
    """They are dropped; what lies on the host stays there."""
    world = World({GPU: 100}, host_limit=100)
    world.put("cold", {GPU: 50}, place="host", ready=True)
    world.put("warm", {GPU: 50}, ready=True, active={"b"})
    world.put("x", {GPU: 50})
    world.ask("a", gpu=50)
    assert world.copies_dropped == ["warm"] and [(move.objects, move.to) for move in world.moves] == [(("x",), "host")]


def test_what_lies_on_the_host_goes_to_a_file() -> None:
    """The least recently used first; the object goes when there is room for its copy."""
    world = World({GPU: 50}, host_limit=100)
    for name in ("old", "new"):
        world.put(name, {GPU: 50}, place="host", ready=True)
    world.put("x", {GPU: 50})
    world.ask("a", gpu=50)
    assert [(move.objects, move.to) for move in world.moves] == [(("old",), "file")]
    world.end_move(world.moves[0])
    assert [(move.objects, move.to) for move in world.moves] == [(("x",), "host")]


def test_without_files_a_full_host_lets_nothing_go() -> None:
    """There is nowhere to go to."""
    world = World({GPU: 50}, host_limit=50)
    world.put("cold", {GPU: 50}, place="host", ready=True, below=("host",))
    world.put("x", {GPU: 50}, below=("host",))
    request = world.ask("a", gpu=50)
    assert world.waiting == [request] and world.moves == []


def test_an_object_larger_than_the_host_goes_to_a_file() -> None:
    """And nothing else has to."""
    world = World({GPU: 100}, host_limit=50)
    world.put("cold", {GPU: 50}, place="host", ready=True)
    world.put("x", {GPU: 100})
    world.ask("a", gpu=50)
    assert [(move.objects, move.to) for move in world.moves] == [(("x",), "file")]


def test_what_the_host_has_no_room_for_beside_others_goes_to_a_file() -> None:
    """Of two that go together, too."""
    world = World({GPU: 100}, host_limit=50)
    world.put("x", {GPU: 50})
    world.put("y", {GPU: 50})
    world.ask("a", gpu=100)
    assert [(move.objects, move.to) for move in world.moves] == [(("x",), "host"), (("y",), "file")]


def test_the_copy_of_what_goes_is_kept() -> None:
    """It is what makes its going cheap; another one makes room."""
    world = World({GPU: 150}, host_limit=100)
    world.put("x", {GPU: 50})
    world.put("y", {GPU: 50}, ready=True)
    world.put("z", {GPU: 50}, ready=True)
    world.ask("a", gpu=100)
    assert world.copies_dropped == ["z"] and [move.objects for move in world.moves] == [("x",), ("y",)]


def test_nothing_goes_where_the_host_has_no_room_for_all_of_it() -> None:
    """The first alone would go for nothing."""
    world = World({GPU: 100}, host_limit=50)
    world.put("x", {GPU: 50}, below=("host",))
    world.put("y", {GPU: 50}, below=("host",))
    world.ask("a", gpu=100)
    assert world.moves == []


def test_a_good_copy_takes_no_more_room() -> None:
    """Its object goes though the host is full, and its copy is none that is dropped for it."""
    world = World({GPU: 100}, host_limit=100)
    world.put("x", {GPU: 50}, ready=True)
    world.put("y", {GPU: 50}, ready=True)
    world.ask("a", gpu=100)
    assert world.copies_dropped == [] and [move.objects for move in world.moves] == [("x",), ("y",)]


# Whatever happens.

NAMES = st.sampled_from([f"o{number}" for number in range(6)])
SESSIONS = st.sampled_from("abcd")
SIZES = st.dictionaries(st.sampled_from([GPU, CPU, "other"]), st.integers(1, 60), min_size=1, max_size=2)


T = TypeVar("T")


def one_of(found: Sequence[T], number: int) -> T:
    """Choose by a number that a rule has drawn."""
    return found[number % len(found)]


class RoomModel(RuleBasedStateMachine):
    """A line whose driver is slow, fails, and whose sessions come and go in any order."""

    @initialize(gpu=st.integers(30, 120), cpu=st.integers(30, 120), host=st.none() | st.integers(0, 150))
    def start(self, gpu: int, cpu: int, host: int | None) -> None:
        """Empty devices."""
        self.world = World({GPU: gpu, CPU: cpu}, host)
        self.ids = itertools.count()

    @rule(session=SESSIONS, sizes=SIZES)
    def ask_for_room(self, session: str, sizes: dict[str, int]) -> None:
        """A buffer, or a result."""
        self.world.enter(RoomRequest(session, sizes))

    @rule(session=SESSIONS, name=NAMES)
    def ask_for_an_object(self, session: str, name: str) -> None:
        """One that the session does not use yet; it may be gone."""
        thing = self.world.things.get(name)
        if thing is None or session not in thing.active:
            self.world.enter(RoomRequest(session, {}, name))

    @rule(
        name=NAMES,
        sizes=SIZES,
        below=st.sampled_from([(), ("host",), ("file",), ("host", "file")]),
        pinned=st.sampled_from([False, False, False, True]),
    )
    def restore_an_earlier_one(self, name: str, sizes: dict[str, int], below: tuple[Below, ...], pinned: bool) -> None:
        """An object that lies below from the beginning."""
        host = self.world.line.host_limit
        fits = below[-1:] != ("host",) or host is None or self.world.on_the_host() + sum(sizes.values()) <= host
        if name not in self.world.things and below and fits:
            self.world.put(name, sizes, below=below, pinned=pinned, place=below[-1], ready=below[-1] == "host")
            self.world.pump()

    @precondition(lambda self: self.world.making)
    @rule(
        number=st.integers(0, 9),
        name=NAMES,
        holder=st.none() | SESSIONS,
        below=st.sampled_from([(), ("host",), ("file",), ("host", "file")]),
        pinned=st.sampled_from([False, False, True]),
        listed=st.booleans(),
    )
    def make(self, number: int, name: str, holder: str | None, below: tuple[Below, ...], pinned: bool, listed: bool) -> None:
        """Memory that was set aside becomes an object, or its maker failed."""
        world = self.world
        reservation = world.making.pop(number % len(world.making))
        sizes = dict(reservation.sizes)
        world.line.redeem(reservation)
        if name not in world.things and (holder or listed):
            active = {holder} if holder else set()
            world.put(name, sizes, below=below, pinned=pinned, active=active, listed=listed)
        world.pump()

    @precondition(lambda self: any(thing.active for thing in self.world.things.values()))
    @rule(number=st.integers(0, 9))
    def suspend(self, number: int) -> None:
        """A session uses an object no more."""
        thing = one_of([thing for thing in self.world.things.values() if thing.active], number)
        self.world.suspend(min(thing.active), thing.name)

    @precondition(lambda self: any(thing.suspended for thing in self.world.things.values()))
    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        """A session gives a suspended object back; the last one of an object that nothing lists ends it."""
        thing = one_of([thing for thing in self.world.things.values() if thing.suspended], number)
        thing.suspended.remove(min(thing.suspended))
        if not (thing.listed or thing.active or thing.suspended or thing.moving):
            del self.world.things[thing.name]
        self.world.pump()

    @precondition(lambda self: self.world.waiting)
    @rule(number=st.integers(0, 9))
    def leave(self, number: int) -> None:
        """A deadline passes."""
        request = one_of(self.world.waiting, number)
        self.world.leave(request)

    @precondition(lambda self: self.world.moves)
    @rule(number=st.integers(0, 9), fails=st.sampled_from([False, False, True]))
    def end_a_move(self, number: int, fails: bool) -> None:
        """The bytes are below, or a disk was full."""
        move = one_of(self.world.moves, number)
        self.world.end_move(move, "no space left on device" if fails else "")

    @precondition(lambda self: self.world.restores)
    @rule(number=st.integers(0, 9), arrives=st.booleans())
    def end_a_restore(self, number: int, arrives: bool) -> None:
        """The bytes are back, or a GPU is gone."""
        restore = one_of(self.world.restores, number)
        self.world.end_restore(restore, arrives=arrives)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        """Time passes, and the sweeper comes by."""
        self.world.clock.time += seconds
        self.world.line.expire()
        self.world.pump()

    @invariant()
    def limits_are_kept(self) -> None:
        """By what is there and what was promised, on the devices and on the host."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for device, limit in world.line.limits.items():
            promised = sum(one.sizes.get(device, 0) for one in world.making)
            promised += sum(one.reservation.sizes.get(device, 0) for one in world.restores)
            assert world.line.reserved(device) == promised
            assert world.used(device) + promised <= limit
        assert world.line.host_limit is None or world.on_the_host() <= world.line.host_limit

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """The first in line lacks room that others use or that is on its way, or waits for the object itself."""
        if not hasattr(self, "world") or not self.world.waiting:
            return
        world, first = self.world, self.world.waiting[0]
        thing = world.things.get(first.object_id)
        assert not (first.object_id and thing is None)
        if thing is not None and thing.moving:
            return
        assert thing is None or thing.place != "device"
        needs = {d: n for d, n in (thing.sizes if thing is not None else first.sizes).items() if d in world.line.limits}
        lacks = {d: n - (world.line.limits[d] - world.used(d) - world.line.reserved(d)) for d, n in needs.items()}
        assert any(nbytes > 0 for nbytes in lacks.values())

    @invariant()
    def the_line_is_what_was_asked(self) -> None:
        """Nobody is lost, and nobody is told twice."""
        if hasattr(self, "world"):
            assert len(self.world.line) == len(self.world.waiting)
            told = [*map(id, self.world.granted), *(id(refusal.request) for refusal in self.world.refused)]
            assert len(told) == len(set(told))

    def teardown(self) -> None:
        """Where all sessions suspend what they use, and moves end well, everybody is served."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.line.host_limit = None
        for _ in range(1000):
            if not world.waiting:
                break
            world.clock.time += 6.0
            world.line.expire()
            for thing in list(world.things.values()):
                for session in sorted(thing.active):
                    world.suspend(session, thing.name)
                if not thing.below and not thing.moving:
                    thing.suspended.clear()
                    thing.listed = True
            for reservation in world.making:
                world.line.redeem(reservation)
            world.making.clear()
            world.pump()
            for move in list(world.moves):
                world.end_move(move)
            for restore in list(world.restores):
                world.end_restore(restore)
        assert world.waiting == []


TestRoomModel = RoomModel.TestCase
TestRoomModel.settings = settings(stateful_step_count=60)


@pytest.mark.parametrize("seed", range(20))
def test_fifty_sessions_that_use_two_objects_in_turns_all_get_on(seed: int) -> None:
    """With room for one object, whichever session is slow: nobody waits for more than two changes of the object."""
    world, chance = World({GPU: 100}), random.Random(seed)
    world.put("x", {GPU: 100}, place="host", ready=True)
    world.put("y", {GPU: 100}, place="file")
    wanted = {f"s{number:02}": itertools.islice(itertools.cycle("xy" if number % 2 else "yx"), 10) for number in range(50)}
    restored: list[str] = []
    #: How many restores had begun when a session asked.
    asked: dict[str, int] = {}
    finished: set[str] = set()
    while len(finished) < 50:
        seen = len(world.restores)
        session = chance.choice(sorted(wanted.keys() - finished))
        using = [thing.name for thing in world.things.values() if session in thing.active]
        if world.moves and chance.random() < 0.3:
            world.end_move(world.moves[0])
        elif world.restores and chance.random() < 0.3:
            world.end_restore(world.restores[0])
            seen -= 1
        elif using:
            world.suspend(session, using[0])
        elif not any(request.waiter == session for request in world.waiting) and not any(
            session in restore.sessions for restore in world.restores
        ):
            name = next(wanted[session], "")
            if name:
                asked[session] = len(restored)
                world.ask(session, name)
            else:
                finished.add(session)
        restored += [restore.thing.name for restore in world.restores[seen:]]
        for request in world.granted:
            assert len(restored) - asked[request.waiter] <= 2
        world.granted.clear()
    assert world.waiting == []
