"""Published objects: their registry, their cache keys, and their ends.

An object stays while a session holds a lease on it or the cache lists it. The cache unlists it on invalidation, when its
``idle_ttl`` passes without a lease or an access, or when a budget of bytes is exceeded: then the least recently used objects
without a lease go first. Leased objects are never dropped, so clients may hold more than ``max_bytes``.

An object that is evicted to a lower tier stays, without memory on its device: it is cold until it is restored. The segments of
a cold object have no descriptors, but already the ids of their next memory; its bytes are in :class:`Copies`.
Objects that share a segment are cold together.

Raw buffers are objects too. They are listed without a key, and not subject to the cache:
:mod:`shared_rpc.server.state.buffers`.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import HostCopy, SegmentInfo, Tier
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.state import Clock
from shared_rpc.server.state.descriptors import Descriptors
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.tiers import LOWER, Copies

#: The form of an object's id.
OBJECT_ID = re.compile("[0-9a-f]{24}")

#: Number of recently built keys whose builds are counted.
_KNOWN_KEYS = 1 << 14


@dataclass(eq=False)
class StoredObject:
    """One object. ``created_at`` is in Unix seconds, for display, and ``last_accessed_at`` on the store's :class:`Clock`;
    ``live`` belongs to its maker and is opaque here; None if no endpoint of this server has its value.

    ``kind`` distinguishes the result of an endpoint from a raw buffer, which has neither endpoint nor key.
    """

    object_id: str
    endpoint: str
    cache_key: str | None
    record: Record
    generation: int
    idle_ttl: float | None
    created_at: float
    last_accessed_at: float
    live: Any = None
    #: True while the cache, or the table of buffers, lists the object; False after invalidation, eviction or freeing.
    listed: bool = False
    #: True if clients get the object with a lease.
    managed: bool = False
    kind: Literal["result", "buffer"] = "result"
    #: True if the code that made the object has been replaced since.
    stale: bool = False
    #: The id of the previous current object of the key, ``""`` for none.
    previous_id: str = ""
    #: Its own page of its revision, see :mod:`shared_rpc.memory.revisions`; None until a client asks for it.
    page: Segment | None = None
    #: The number of the run that made the object, in the order of their starts; 0 if no run of this server made it.
    run: int = 0
    #: True if it came as a record of another process.
    adopted: bool = False
    #: True if it may be made the current one of its key; and True if that was invalidated since.
    candidate: bool = False
    invalidated: bool = False
    #: The tier of its bytes; when it gets a copy in a lower tier; and True if it is never evicted.
    tier: Tier = "device"
    host_copy: HostCopy = "on_evict"
    pinned: bool = False
    #: Its place in the store's order of insertion, from 1.
    number: int = 0

    @property
    def cold(self) -> bool:
        """True if its bytes are only in a lower tier, so that it must be restored before use."""
        return self.tier != "device"

    @property
    def current(self) -> bool:
        """True unless another object has replaced it: the cache lists it, or never would."""
        return self.listed or self.cache_key is None

    def has_replaced(self, segment_ids: Iterable[str]) -> bool:
        """Return True if some of these segments were its own before it was evicted."""
        return not {segment.info.id for segment in self.record.segments}.issuperset(segment_ids)

    def close(self) -> None:
        """Close the descriptors of its memory and of its page."""
        self.record.close()
        if self.page is not None:
            self.page.close()


def infos_of(group: Iterable[StoredObject]) -> dict[str, SegmentInfo]:
    """Return the segments of objects by id; writable if any object has the segment writable."""
    infos: dict[str, SegmentInfo] = {}
    for stored in group:
        for segment in stored.record.segments:
            if segment.info.access == "read_write" or segment.info.id not in infos:
                infos[segment.info.id] = segment.info
    return infos


def usage_of(segments: Mapping[str, SegmentInfo]) -> dict[str, int]:
    """Sum bytes by device, of segments by id: a segment shared by objects, of any store, counts once."""
    usage: dict[str, int] = {}
    for info in segments.values():
        usage[info.device] = usage.get(info.device, 0) + info.nbytes
    return usage


class ObjectStore:
    """All objects of a server.

    :param max_bytes: memory budget of all objects, None for no limit.
    :param on_drop: called once with every dropped object, after its removal from the store.
    :param on_add: called once with every new object.
    :param descriptors: those of the process.
    """

    def __init__(
        self,
        leases: LeaseTable,
        clock: Clock,
        on_drop: Callable[[StoredObject], None],
        max_bytes: int | None = None,
        on_add: Callable[[StoredObject], None] | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:
        self.descriptors = descriptors or Descriptors()
        self.copies = Copies()
        #: The last incarnation number. None is reused: a process may still have the memory of any earlier one.
        self._incarnation = 0
        self._leases = leases
        self._clock = clock
        self._on_drop = on_drop
        self._on_add = on_add
        self.max_bytes = max_bytes
        self._objects: dict[str, StoredObject] = {}
        self._numbers = itertools.count(1)
        self._by_key: OrderedDict[str, StoredObject] = OrderedDict()
        #: True once the count of a key was forgotten.
        self._forgot = False
        #: Builds by key. The count of a long unused key restarts when no object of it is left.
        self._generations: OrderedDict[str, int] = OrderedDict()
        #: Segments by id, one for each object in it. Objects share a segment by one descriptor; a cold one has none.
        self._segments: dict[str, dict[Segment, StoredObject]] = {}
        #: Number of raw buffers among the objects.
        self.buffers = 0
        #: Bytes of the segments, by device.
        self._nbytes: Counter[str] = Counter()
        #: Called when an object is listed or unlisted, and when a listed one changes its tier or terms, but not when all are
        #: dropped at the server's end. Must not raise.
        self.observer: Callable[[StoredObject], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, without duplicates."""
        return self._nbytes.total()

    def segments(self) -> dict[str, SegmentInfo]:
        """Return all segments that have memory, by id."""
        first = {segment_id: next(iter(shares)) for segment_id, shares in self._segments.items()}
        return {segment_id: segment.info for segment_id, segment in first.items() if not segment.closed}

    def used(self, device: str) -> int:
        """Return the bytes of the segments on a device, without duplicates."""
        return self._nbytes[device]

    def segment(self, segment_id: str) -> Segment | None:
        """Return a segment used by an object, which keeps ownership."""
        segment = next(iter(self._segments.get(segment_id, ())), None)
        return segment if segment is not None and not segment.closed else None

    def add(
        self,
        spec: EndpointSpec,
        key: str | None,
        record: Record,
        live: Any = None,
        *,
        run: int = 0,
        listed: bool = True,
        kind: Literal["result", "buffer"] = "result",
        adopted: bool = False,
        candidate: bool = False,
    ) -> StoredObject:
        """Keep a record; with a key the cache lists it, in place of an object of that key whose run began earlier.

        The object needs a holder or a listing: call :meth:`settle` once its leases are granted.

        :param spec: that of its endpoint.
        :param listed: False for an object whose key was invalidated before it was made.
        """
        now = self._clock.now()
        stored = StoredObject(
            object_id=secrets.token_hex(12),
            endpoint=spec.name,
            cache_key=key,
            record=record,
            generation=self._count_build(key) if key is not None else 1,
            idle_ttl=spec.idle_ttl,
            created_at=self._clock.unix(now),
            last_accessed_at=now,
            live=live,
            managed=spec.managed,
            kind=kind,
            run=run,
            adopted=adopted,
            candidate=candidate,
            host_copy=spec.host_copy,
            pinned=spec.pinned,
        )
        current = self.current(key)
        listed = listed and not (current is not None and current.run > run)
        self._enter(stored, listed=listed)
        self.notify(stored)
        return stored

    def recover(self, stored: StoredObject) -> None:
        """Add an object of an earlier server in its former state; the time in between does not count as idle."""
        stored.last_accessed_at = self._clock.now()
        for segment in stored.record.segments:
            self._incarnation = max(self._incarnation, int(segment.info.id.partition(".")[2] or 0))
        if stored.cache_key is not None:
            self._generations[stored.cache_key] = stored.generation
        stored.listed = True
        self._enter(stored)

    def _enter(self, stored: StoredObject, *, listed: bool = True) -> None:
        stored.number = next(self._numbers)
        self._objects[stored.object_id] = stored
        self.buffers += stored.kind == "buffer"
        stored.record.segments = tuple([self._share(segment, stored) for segment in stored.record.segments])
        if stored.cache_key is not None and listed:
            self._list(stored, stored.cache_key)
        if self._on_add is not None:
            self._on_add(stored)

    def _list(self, stored: StoredObject, key: str) -> None:
        earlier = self._by_key.get(key)
        if earlier is not None:
            stored.previous_id = earlier.object_id
            self.unlist(earlier)
        stored.listed = True
        self._by_key[key] = stored

    def promote(self, stored: StoredObject) -> None:
        """List a candidate, in place of the current object of its key."""
        assert stored.cache_key is not None, "a candidate has a key"
        stored.candidate = False
        self._list(stored, stored.cache_key)
        self.notify(stored)

    def _share(self, segment: Segment, stored: StoredObject) -> Segment:
        """Return a segment for an object, with the existing descriptor if another object uses the segment."""
        shares = self._segments.setdefault(segment.info.id, {})
        if shares and not segment.closed:
            with segment:
                segment = next(iter(shares)).duplicate(segment.info.access)
        elif not segment.closed:
            self._count(segment.info, 1)
        shares[segment] = stored
        return segment

    def _count(self, info: SegmentInfo, sign: int) -> None:
        self._nbytes[info.device] += sign * info.nbytes

    def group(self, stored: StoredObject) -> list[StoredObject]:
        """Return an object and those that share segments with it, directly or indirectly: their tiers change together.

        Slabs do not count: they stay on their devices.
        """
        group, known = [stored], set[str]()
        for member in group:  # it grows during the loop
            for info in [segment.info for segment in member.record.segments]:
                if not info.slab and info.id not in known:
                    known.add(info.id)
                    group += [each for each in self._segments.get(info.id, {}).values() if each not in group]
        return group

    def evict(self, group: Sequence[StoredObject], tier: Tier) -> None:
        """Close the memory of a whole group, whose bytes are in copies of a tier.

        These copies are kept under the segments' new ids; copies in tiers between are dropped.
        """
        had_memory = False
        for segment_id in {segment.info.id for stored in group for segment in stored.record.segments}:
            shares = self._segments.pop(segment_id)
            first = next(iter(shares))
            if not first.closed:
                self._incarnation += 1
                following = first.info.incarnation(self._incarnation)
                self._count(first.info, -1)
                had_memory = True
                self.copies.rename(segment_id, following.id)
                for segment in shares:
                    segment.close()
                    segment.info = msgspec.structs.replace(following, access=segment.info.access)
            self._segments[first.info.id] = shares
            for between in LOWER[: LOWER.index(tier)]:
                self.copies.discard(first.info.id, between)
        for stored in group:
            stored.tier = tier
            if had_memory:
                stored.live = None  # it lies in the freed memory: from now on the object is treated as one of another process
        self.notify(*group)

    def warm(self, group: Sequence[StoredObject], segments: Iterable[Segment]) -> None:
        """Take ownership of the new memory of a whole cold group: each of its segments once."""
        for segment in segments:
            with segment:
                for share in self._segments[segment.info.id]:
                    share.descriptor = segment.descriptor
            self._count(segment.info, 1)
        for stored in group:
            stored.tier = "device"
        self.notify(*group)

    def notify(self, *changed: StoredObject) -> None:
        """Call the observer, if any."""
        if self.observer is not None:
            for stored in changed:
                self.observer(stored)

    def _count_build(self, key: str) -> int:
        count = self._generations.pop(key, 0)
        if not count and self._forgot:  # clients that hold an earlier object are notified of the next one
            count = max((stored.generation for stored in self._objects.values() if stored.cache_key == key), default=0)
        self._generations[key] = count + 1
        if len(self._generations) > _KNOWN_KEYS:
            self._generations.popitem(last=False)
            self._forgot = True
        return count + 1

    def adopt(self, other: ObjectStore, spec_of: Callable[[str], EndpointSpec]) -> None:
        """List the objects of another store as objects of this one; those in segments are in use there, and stay there."""
        for stored in other._by_key.values():
            if stored.record.segments:
                continue
            self.add(spec_of(stored.endpoint), stored.cache_key, stored.record, stored.live, adopted=stored.adopted)

    def lookup(self, key: str) -> StoredObject | None:
        """Return the cached object of a key, and count an access."""
        stored = self._by_key.get(key)
        if stored is not None:
            self._by_key.move_to_end(key)
            stored.last_accessed_at = self._clock.now()
        return stored

    def current(self, key: str | None) -> StoredObject | None:
        """Return the cached object of a key, without counting an access."""
        return self._by_key.get(key) if key is not None else None

    def get(self, object_id: str) -> StoredObject | None:
        """Return an object by id, without counting an access."""
        return self._objects.get(object_id)

    def settle(self, *object_ids: str) -> None:
        """Drop objects without leases or listing, after leases ended or an object was added; then enforce the budget.

        In this order, because memory that is freed anyway must not evict a cached object.
        """
        for object_id in object_ids:
            stored = self._objects.get(object_id)
            if stored is not None:
                # Time with a lease does not count as idle.
                stored.last_accessed_at = self._clock.now()
                if stored.listed and stored.cache_key is not None:
                    self._by_key.move_to_end(stored.cache_key)
                self._drop_if_unkept(stored)
        self._keep_to_budget()

    def invalidate(self, *, key: str | None = None, endpoint: str | None = None) -> int:
        """Unlist the object of a key, or all of an endpoint; return their number. Leased ones stay with their holders.

        Candidates of theirs can no longer be listed.
        """
        for stored in self._objects.values():
            if stored.candidate and (stored.cache_key == key or stored.endpoint == endpoint):
                stored.invalidated = True
        matching = [s for s in self._by_key.values() if s.cache_key == key or s.endpoint == endpoint]
        for stored in matching:
            self.unlist(stored)
        return len(matching)

    def drop_idle(self, nbytes: int, device: str) -> bool:
        """Evict cached objects without a lease, least recently used first, until ``nbytes`` of a device are freed.

        Return False and evict nothing if all of them do not suffice.
        """
        evicted: list[StoredObject] = []
        users: Counter[str] = Counter()
        for stored in self._by_key.values():
            segments = {segment.info.id: segment for segment in stored.record.segments if not segment.closed}
            sizes = {name: segment.info.nbytes for name, segment in segments.items() if segment.info.device == device}
            if self._leases.held(stored.object_id) or stored.pinned or not sizes:
                continue
            evicted.append(stored)
            users.update(sizes.keys())
            nbytes -= sum(size for name, size in sizes.items() if users[name] == len(self._segments[name]))
            if nbytes <= 0:
                break
        if nbytes > 0:
            return False
        for stored in evicted:
            self.unlist(stored)
        return True

    def expire(self) -> float | None:
        """Unlist objects idle for their ``idle_ttl``; return the seconds until the next one may be, None for never."""
        now = self._clock.now()
        remaining = [
            (stored.last_accessed_at + stored.idle_ttl - now, stored)
            for stored in self._by_key.values()
            if stored.idle_ttl is not None and not self._leases.held(stored.object_id)
        ]
        for left, stored in remaining:
            if left <= 0:
                self.unlist(stored)
        return min((left for left, _ in remaining if left > 0), default=None)

    def clear(self) -> None:
        """Drop everything, leased or not, at the end of the server."""
        self._by_key.clear()
        for stored in list(self._objects.values()):
            self._drop(stored)

    def _keep_to_budget(self) -> None:
        if self.max_bytes is None or self.nbytes <= self.max_bytes:
            return
        for stored in list(self._by_key.values()):
            if not (self._leases.held(stored.object_id) or stored.cold or stored.pinned):
                self.unlist(stored)
                if self.nbytes <= self.max_bytes:
                    return

    def unlist(self, stored: StoredObject) -> None:
        """Unlist an object: it stays with its holders, and is dropped with its last lease."""
        if stored.listed and stored.cache_key is not None:
            del self._by_key[stored.cache_key]
        stored.listed = False
        self.notify(stored)
        self._drop_if_unkept(stored)

    def _drop_if_unkept(self, stored: StoredObject) -> None:
        if not stored.listed and not self._leases.held(stored.object_id):
            self._drop(stored)

    def _drop(self, stored: StoredObject) -> None:
        if stored.page is not None and not stored.cold and len(self.copies):
            # The copies of objects that share its memory include its revision.
            for segment in (segment for member in self.group(stored)[1:] for segment in member.record.segments):
                self.copies.discard(segment.info.id)
        del self._objects[stored.object_id]
        self.buffers -= stored.kind == "buffer"
        for segment in stored.record.segments:
            shares = self._segments[segment.info.id]
            del shares[segment]
            if not shares:
                del self._segments[segment.info.id]
                if not segment.closed:
                    self._count(segment.info, -1)
                self.copies.discard(segment.info.id)
        self._on_drop(stored)

    def page(self, after: int, limit: int) -> tuple[list[StoredObject], int | None]:
        """List objects in order of creation, those after number ``after``: ``(objects, next after or None)``."""
        found = list(itertools.islice((stored for stored in self._objects.values() if stored.number > after), limit + 1))
        return found[:limit], found[limit - 1].number if len(found) > limit else None

    def __iter__(self) -> Iterator[StoredObject]:
        return iter(tuple(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)
