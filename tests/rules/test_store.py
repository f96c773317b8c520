"""The server's state: leases, runs and objects. No sockets, no threads, and the test sets the clock."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared_rpc.execution.run import Run
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.records import Arguments, Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import EMPTY_TABLE, SegmentInfo, Tier
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.state import objects
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.state.runs import RunTable
from tests.kit.clock import Clock


def segment_of(info: SegmentInfo) -> Segment:
    """Return a segment with a descriptor of its own."""
    return Segment.owning(info, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def record_of(*segments: str) -> Record:
    """Return a record of segments by id, each with a real descriptor and a hundred bytes."""
    found = [segment_of(SegmentInfo(name, 100, "cpu")) for name in segments]
    return Record(b"", EMPTY_TABLE, found, 100 * len(found))


class Shelf:
    """A store, its leases, its clock, and the dropped objects."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.clock = Clock()
        self.leases = LeaseTable()
        self.dropped: list[StoredObject] = []
        self.store = ObjectStore(self.leases, self.clock, self.drop, max_bytes)

    def drop(self, stored: StoredObject) -> None:
        """Drop an object like a server, after the store has removed it."""
        assert self.store.get(stored.object_id) is None
        self.dropped.append(stored)
        stored.record.close()

    def open_descriptors(self, objects: Iterable[StoredObject]) -> int:
        """Count the open segments of these objects."""
        return sum(not segment.closed for stored in objects for segment in stored.record.segments)

    def add(self, key: str | None, *segments: str, holders: str = "") -> StoredObject:
        """Add a new object, held by sessions of one letter each."""
        stored = self.store.add(EndpointSpec("f"), key, record_of(*(segments or (f"of {key}",))))
        for session in holders:
            self.leases.grant(session, stored.object_id)
        self.store.settle(stored.object_id)
        return stored

    def release(self, session: str, stored: StoredObject) -> bool:
        """Release one lease of a session."""
        held = self.leases.release(session, stored.object_id)
        self.store.settle(stored.object_id)
        return held


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """A store without a budget, which drops everything in the end."""
    shelf = Shelf()
    yield shelf
    shelf.store.clear()


# Leases.


def test_a_lease_is_active_unless_it_is_suspended() -> None:
    """Until it is resumed, or its session gets another handle; an ended session leaves no suspension."""
    leases = LeaseTable()
    for session in "ab":
        leases.grant(session, "x")
    assert leases.suspend("a", "x") and not leases.suspend("a", "x") and not leases.suspend("c", "x")
    assert (leases.active("x"), leases.holders("x")) == ({"b"}, {"a", "b"})
    leases.resume("a", "x")
    leases.resume("c", "x")
    assert leases.active("x") == {"a", "b"}
    leases.suspend("a", "x")
    leases.grant("a", "x")
    assert leases.active("x") == {"a", "b"}
    leases.suspend("a", "x")
    assert leases.release("a", "x") and leases.active("x") == {"b"} and leases.suspend("a", "x") is False
    leases.end_session("a")
    leases.grant("a", "x")
    assert leases.active("x") == {"a", "b"}


def test_uses_are_reported_for_grants_and_resumes() -> None:
    """For every granted handle and every resumed lease, but not for ends of leases."""
    leases, heard = LeaseTable(), list[str]()
    leases.on_active = heard.append
    leases.grant("a", "x")
    leases.grant("a", "y")
    leases.suspend("a", "x")
    leases.resume("a", "x")
    leases.grant("a", "x")
    leases.end_session("a")
    assert heard == ["x", "y", "x", "x"]


def test_the_first_and_last_handle_of_a_session_are_reported() -> None:
    """Neither handles in between nor those of another session."""
    events: list[tuple[str, Any, str]] = []
    leases = LeaseTable(
        on_give=lambda session, object_id: events.append(("give", session, object_id)),
        on_end=lambda session, object_id, reclaimed: events.append(("end", session, object_id)),
    )
    for session in "aab":
        leases.grant(session, "x")
    leases.release("a", "x")
    assert events == [("give", "a", "x"), ("give", "b", "x")]
    leases.end_session("a")
    leases.release("b", "x")
    assert events[2:] == [("end", "a", "x"), ("end", "b", "x")]


def test_leases_can_be_granted_inactive() -> None:
    """They were never active; a handle of a session that has the object active changes nothing."""
    leases, heard = LeaseTable(), list[str]()
    leases.on_active = heard.append
    for _ in range(2):
        leases.grant("a", "x", active=False)
    assert (leases.active("x"), leases.holders("x"), leases.handles("a", "x"), heard) == (set(), {"a"}, 2, [])
    leases.grant("b", "x")
    leases.grant("b", "x", active=False)
    assert (leases.active("x"), heard) == ({"b"}, ["x"])
    leases.grant("a", "x")
    assert leases.active("x") == {"a", "b"}
    for session in "ab":
        leases.end_session(session)
    leases.grant("a", "x")
    assert leases.active("x") == {"a"}


# Evictions.


def evicted(shelf: Shelf, stored: StoredObject) -> str:
    """Evict an object of one segment; return the segment's next id."""
    [segment] = stored.record.segments
    shelf.store.copies.add(segment.info, LowerCopy(record_of("copy").segments[0], "host"))
    shelf.store.evict([stored], "host")
    return segment.info.id


def test_an_evicted_result_was_built_here(shelf: Shelf) -> None:
    """It loses its value with its memory, and does not count as a record of another process."""
    stored = shelf.add("f(1)", holders="a")
    stored.live = "value"
    evicted(shelf, stored)
    assert (stored.live, stored.adopted) == (None, False)


def test_incarnations_have_unique_ids(shelf: Shelf) -> None:
    """Numbers continue after an earlier server's."""
    one, other = shelf.add("f(1)", "a"), shelf.add("f(2)", "b")
    assert (evicted(shelf, one), evicted(shelf, other)) == ("a.1", "b.2")
    shelf.store.warm([one], record_of("a.1").segments)
    shelf.store.recover(Shelf().add("f(3)", "c.7"))
    assert evicted(shelf, one) == "a.8"


# Runs of endpoints.


def opened(calls: RunTable[Any], endpoint: str, key: str | None, waiter: object) -> Run[Any]:
    """Return a new run of the table."""
    run = Run(EndpointSpec(endpoint), key, Arguments(), {waiter: None}, cached=key is not None)
    calls.open(run)
    return run


def test_leaving_a_run_that_ended_drops_nothing() -> None:
    """Its place may be another run's by then."""
    calls: RunTable[str] = RunTable()
    ended = opened(calls, "f", "f(1)", "first")
    calls.close(ended)
    current = opened(calls, "f", "f(1)", "second")
    assert not calls.leave(ended, "first")
    assert calls.join("f(1)", "third") is current


# Objects.


def ids_of(stored: StoredObject) -> list[str]:
    """Return the segments of an object."""
    return [segment.info.id for segment in stored.record.segments]


SESSIONS, KEYS, SEGMENTS = st.sampled_from("abc"), st.sampled_from(["f(1)", "f(2)", "g(1)"]), st.sampled_from("stuvw")


class StoreModel(RuleBasedStateMachine):
    """The store and its leases compared with a model of a few dicts: both agree at any time on the objects that exist."""

    @initialize(max_bytes=st.sampled_from([None, 0, 150, 300]))
    def start(self, max_bytes: int | None) -> None:
        """Start with an empty store."""
        self.max_bytes = max_bytes
        self.shelf = Shelf(max_bytes)
        self.alive: dict[str, StoredObject] = {}
        self.listed: dict[str, StoredObject] = {}
        self.handles: Counter[tuple[str, str]] = Counter()
        self.used: dict[str, float] = {}
        self.builds: Counter[str] = Counter()

    def held(self, stored: StoredObject) -> bool:
        """Return whether the model has a handle of it."""
        return any(object_id == stored.object_id and count for (_, object_id), count in self.handles.items())

    def bytes_of(self, objects: list[StoredObject]) -> int:
        """Return the distinct bytes of objects on their device."""
        return len({segment.info.id for stored in objects if not stored.cold for segment in stored.record.segments}) * 100

    def unlist(self, matching: Callable[[StoredObject], bool]) -> int:
        """Remove objects from the model's cache."""
        keys = [key for key, stored in self.listed.items() if matching(stored)]
        for key in keys:
            del self.listed[key]
        self.forget_unkept()
        return len(keys)

    def forget_unkept(self) -> None:
        """Remove objects that are neither listed nor held."""
        for object_id, stored in list(self.alive.items()):
            if stored not in self.listed.values() and not self.held(stored):
                del self.alive[object_id]

    def settle(self, *objects: StoredObject) -> None:
        """Update the model after leases have ended, or an object was added."""
        for stored in objects:
            self.used[stored.object_id] = self.shelf.clock.time
        self.forget_unkept()
        for candidate in sorted(self.listed.values(), key=lambda stored: self.used[stored.object_id]):
            if self.max_bytes is None or self.bytes_of(list(self.alive.values())) <= self.max_bytes:
                return
            if not self.held(candidate) and not candidate.cold:
                self.unlist(lambda stored, candidate=candidate: stored is candidate)

    @rule(
        key=st.none() | KEYS,
        segments=st.sets(SEGMENTS, max_size=3),
        holders=st.lists(SESSIONS, max_size=3),
        idle_ttl=st.sampled_from([None, 0.0, 5.0, 20.0]),
    )
    def add(self, key: str | None, segments: set[str], holders: list[str], idle_ttl: float | None) -> None:
        """Add the object of a successful run."""
        self.tick(1.0)
        spec = EndpointSpec((key or "f")[0], idle_ttl=idle_ttl)
        stored = self.shelf.store.add(spec, key, record_of(*sorted(segments)))
        self.alive[stored.object_id] = stored
        for session in holders:
            self.shelf.leases.grant(session, stored.object_id)
            self.handles[session, stored.object_id] += 1
        if key is not None:
            self.builds[key] += 1
            self.listed[key] = stored
        assert stored.generation == (self.builds[key] if key is not None else 1)
        self.shelf.store.settle(stored.object_id)
        self.settle(stored)

    @rule(key=KEYS, session=st.none() | SESSIONS)
    def look_up(self, key: str, session: str | None) -> None:
        """Look up a cached object, and lease a managed one."""
        self.tick(1.0)
        stored = self.shelf.store.lookup(key)
        assert stored is self.listed.get(key)
        if stored is not None:
            self.used[stored.object_id] = self.shelf.clock.time
            if session is not None:
                self.shelf.leases.grant(session, stored.object_id)
                self.handles[session, stored.object_id] += 1

    @precondition(lambda self: self.alive)
    @rule(session=SESSIONS, number=st.integers(0, 20))
    def release(self, session: str, number: int) -> None:
        """Release a handle of a session, which it may not have."""
        self.tick(1.0)
        stored = list(self.alive.values())[number % len(self.alive)]
        had = self.handles[session, stored.object_id] > 0
        assert self.shelf.leases.release(session, stored.object_id) == had
        if had:
            self.handles[session, stored.object_id] -= 1
            self.shelf.store.settle(stored.object_id)
            self.settle(stored)

    def group(self, stored: StoredObject) -> list[StoredObject]:
        """Return the objects that share memory, by brute force."""
        group, segments = {stored.object_id: stored}, set(ids_of(stored))
        while joining := {i: o for i, o in self.alive.items() if i not in group and segments & set(ids_of(o))}:
            group.update(joining)
            segments.update(*map(ids_of, joining.values()))
        return list(group.values())

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 20), tier=st.sampled_from(["host", "file"]))
    def move(self, number: int, tier: Tier) -> None:
        """Evict an object with those that share its memory, or restore them."""
        stored = list(self.alive.values())[number % len(self.alive)]
        group, store = self.shelf.store.group(stored), self.shelf.store
        assert {each.object_id for each in group} == {each.object_id for each in self.group(stored)}
        infos = {segment.info.id: segment.info for each in group for segment in each.record.segments}
        if stored.cold:
            store.warm(group, record_of(*infos).segments)
            store.settle()
            self.settle()
            return
        for info in infos.values():
            store.copies.add(info, LowerCopy(record_of("copy").segments[0], tier))
        nbytes = store.nbytes
        store.evict(group, tier)
        assert nbytes - store.nbytes == 100 * len(infos)
        assert not set(infos) & set().union(*map(ids_of, group))

    @rule(session=SESSIONS)
    def end_session(self, session: str) -> None:
        """End a session, as after a kill."""
        self.tick(1.0)
        held = {object_id for (holder, object_id), count in self.handles.items() if holder == session and count}
        ended = self.shelf.leases.end_session(session)
        assert sorted(ended) == sorted(held)
        for key in [key for key in self.handles if key[0] == session]:
            del self.handles[key]
        self.shelf.store.settle(*ended)
        self.settle(*(self.alive[object_id] for object_id in ended))

    @rule(key=KEYS)
    def invalidate_key(self, key: str) -> None:
        """Invalidate one call."""
        assert self.shelf.store.invalidate(key=key) == self.unlist(lambda stored: stored.cache_key == key)

    @rule(endpoint=st.sampled_from("fgh"))
    def invalidate_endpoint(self, endpoint: str) -> None:
        """Invalidate all calls of an endpoint."""
        assert self.shelf.store.invalidate(endpoint=endpoint) == self.unlist(lambda stored: stored.endpoint == endpoint)

    @rule(seconds=st.sampled_from([0.5, 5.0, 20.0]))
    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.shelf.clock.time += seconds

    @rule()
    def expire(self) -> None:
        """Run the sweeper."""
        now = self.shelf.clock.time
        ends = {
            stored.object_id: self.used[stored.object_id] + stored.idle_ttl
            for stored in self.listed.values()
            if stored.idle_ttl is not None and not self.held(stored)
        }
        pause = self.shelf.store.expire()
        assert pause == min((end - now for end in ends.values() if end > now), default=None)
        self.unlist(lambda stored: ends.get(stored.object_id, now + 1) <= now)

    @invariant()
    def both_agree(self) -> None:
        """Both agree on the existing objects, the listed ones, their holders, and their memory."""
        store, leases = self.shelf.store, self.shelf.leases
        assert {stored.object_id for stored in store} == set(self.alive) and len(store) == len(self.alive)
        assert {stored.object_id for stored in store if stored.listed} == {s.object_id for s in self.listed.values()}
        assert all(leases.held(object_id) == self.held(stored) for object_id, stored in self.alive.items())
        assert len(leases) == sum(count > 0 for count in self.handles.values())
        assert store.nbytes == self.bytes_of(list(self.alive.values()))
        assert {s.object_id: s.last_accessed_at for s in self.alive.values()} == {i: self.used[i] for i in self.alive}

    @invariant()
    def nothing_is_dropped_twice(self) -> None:
        """No object is dropped twice, or while it exists; exactly the descriptors of dropped ones are closed."""
        dropped = [stored.object_id for stored in self.shelf.dropped]
        assert len(dropped) == len(set(dropped))
        assert not set(dropped) & set(self.alive)
        assert self.shelf.open_descriptors(self.shelf.dropped) == 0
        warm = [stored for stored in self.alive.values() if not stored.cold]
        assert self.shelf.open_descriptors(self.alive.values()) == sum(len(s.record.segments) for s in warm)

    @invariant()
    def cold_objects_have_copies(self) -> None:
        """A cold object has a copy of each of its segments, and all other copies are of current memory."""
        store, alive = self.shelf.store, self.alive.values()
        memory = {segment_id for stored in alive if not stored.cold for segment_id in ids_of(stored)}
        assert set(store.segments()) == memory
        cold = {segment_id for stored in alive if stored.cold for segment_id in ids_of(stored)}
        assert all(store.copies.of(segment_id) for segment_id in cold)
        assert len(store.copies) == sum(len(store.copies.of(segment_id)) for segment_id in memory | cold)
        assert sum(store.copies.usage().values()) == 100 * len(store.copies)

    @invariant()
    def the_budget_is_kept(self) -> None:
        """Memory exceeds the budget only for held objects."""
        if self.max_bytes is not None and self.shelf.store.nbytes > self.max_bytes:
            assert all(self.held(stored) for stored in self.alive.values() if not stored.cold)

    def teardown(self) -> None:
        """Stop the server."""
        if hasattr(self, "shelf"):
            self.shelf.store.clear()
            assert len(self.shelf.dropped) == len({stored.object_id for stored in self.shelf.dropped})
            assert self.shelf.open_descriptors(self.shelf.dropped) == 0
            assert len(self.shelf.store.copies) == 0


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(stateful_step_count=40)


class CallModel(RuleBasedStateMachine):
    """The call table compared with a list of waiters by run. Every waiter is answered once, or has left."""

    @initialize()
    def start(self) -> None:
        """Start without calls."""
        self.calls: RunTable[int] = RunTable()
        self.waiting: dict[int, Run[int]] = {}
        self.runs: list[Run[int]] = []
        self.joinable: dict[str | None, Run[int]] = {}
        self.answered: list[int] = []
        self.number = 0

    @rule(key=st.sampled_from(["f(1)", "f(1)", "g(1)", None]), singleflight=st.booleans())
    def call(self, key: str | None, singleflight: bool) -> None:
        """Join a run of a key, or start one."""
        self.number += 1
        run = self.calls.join(key, self.number) if singleflight else None
        if singleflight:
            assert run is self.joinable.get(key)
        if run is None:
            run = opened(self.calls, (key or "f")[0], key, self.number)
            self.runs.append(run)
            if key is not None:
                self.joinable.setdefault(key, run)
        self.waiting[self.number] = run

    def not_joinable(self, *runs: Run[int]) -> None:
        """Check that a call joins no ended or detached run."""
        self.joinable = {key: run for key, run in self.joinable.items() if run not in runs}

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 20))
    def begin(self, number: int) -> None:
        """Begin the work of a run."""
        self.runs[number % len(self.runs)].running = True

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 20))
    def leave(self, number: int) -> None:
        """Remove a caller; the last of a queued run cancels it."""
        waiter = list(self.waiting)[number % len(self.waiting)]
        run = self.waiting.pop(waiter)
        drop = self.calls.leave(run, waiter)
        assert drop == (run not in self.waiting.values() and not run.running)
        if drop:
            assert self.calls.close(run) == []
            self.runs.remove(run)
            self.not_joinable(run)

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 20))
    def close(self, number: int) -> None:
        """End a run with any outcome."""
        run = self.runs.pop(number % len(self.runs))
        expected = [waiter for waiter, joined in self.waiting.items() if joined is run]
        assert self.calls.close(run) == expected
        self.not_joinable(run)
        for waiter in expected:
            del self.waiting[waiter]
        self.answered += expected

    @rule(key=KEYS | st.none(), endpoint=st.sampled_from("fg"))
    def detach(self, key: str | None, endpoint: str) -> None:
        """Invalidate a call, or all calls of an endpoint: their runs continue without a key."""
        what = {"key": key} if key else {"endpoint": endpoint}
        runs = [run for run in self.runs if run.key and (run.key == key or (not key and run.key[0] == endpoint))]
        self.calls.detach(**what)
        assert all(not run.cached and run in self.calls for run in runs)
        self.not_joinable(*runs)

    @invariant()
    def every_waiter_is_with_its_run(self) -> None:
        """Every waiter is assigned to exactly its run; answered ones no longer wait."""
        assert set(self.calls) == set(self.runs) and len(self.calls) == len(self.runs)
        assert {waiter: run for run in self.calls for waiter in run.waiters} == self.waiting
        assert len(self.answered) == len(set(self.answered)) and not set(self.answered) & set(self.waiting)


TestCallModel = CallModel.TestCase
TestCallModel.settings = settings(stateful_step_count=40)


def test_generations_continue_while_an_object_is_held(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many other keys were built since: holders wait for news of a later one. Then the count restarts."""
    monkeypatch.setattr(objects, "_KNOWN_KEYS", 2)
    held = shelf.add("f(1)", holders="a")
    shelf.store.invalidate(key="f(1)")
    for key in ("f(2)", "f(3)", "f(4)"):
        shelf.add(key)
    assert shelf.add("f(1)").generation == held.generation + 1
    shelf.release("a", held)
    shelf.store.invalidate(endpoint="f")
    for key in ("f(2)", "f(3)", "f(4)"):
        shelf.add(key)
    assert shelf.add("f(1)").generation == 1
