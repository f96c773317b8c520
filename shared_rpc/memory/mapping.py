"""The segments mapped by this process, and their users.

A segment is mapped at most once for each kind of access, except copy-on-write: each attach has its own copy. A segment is
unmapped after its last object: a finaliser enqueues, and :meth:`MappingTable.drain` synchronises the device and unmaps.

A segment whose objects are all suspended is *vacated*: its memory is unmapped and its address stays reserved. The current
incarnation of the segment is mapped at that address later::

              suspend                          resume, attach
    mapped ─────────────► vacated ──────────────────────────────► mapped
       │   synchronised      │      other memory, if the object
       │                     │      was evicted since then
       └── last object gone ─┴──► unmapped, and the address released
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from shared_rpc.errors import CapabilityError, CodecError, HandleSuspended, ProtocolError, raised_by_handler
from shared_rpc.forks import after_fork, fork_safe_lock
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.faults import FaultHandler, Target
from shared_rpc.memory.segments import KEPT_SLABS, Backend, Segment
from shared_rpc.protocol.records import Access, SegmentInfo

_log = logging.getLogger("shared_rpc")

T = TypeVar("T")

#: Labels of one mapping.
_LABELS = 4


class Mapping(msgspec.Struct, eq=False):
    """One mapped segment."""

    info: SegmentInfo
    address: int
    backend: Backend
    #: The segment, if this process may publish the memory again, closed while vacated; the mapping itself needs no descriptor.
    descriptor: Segment | None = None
    #: Distinguishes mappings of one segment with one access: copy-on-write ones, or two at addresses kept by suspension.
    number: int = 0
    #: True while the address is reserved and nothing is mapped there.
    vacated: bool = False
    #: True if :meth:`MappingTable.find` skips the mapping.
    hidden: bool = False
    #: The id of the server that keeps the segment under its id; ``""`` for none.
    owner: str = ""
    #: True if this process made the segment; True until it has published it.
    made: bool = False
    fresh: bool = False
    #: True if consumers may map it only for reading.
    sealed: bool = False
    #: The number of running blocks that use the mapping, and the unended uses of it.
    pins: int = 0
    uses: set[_Use] = msgspec.field(default_factory=set)
    #: Descriptions of the objects in the segment, for messages.
    labels: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.sealed = self.info.access != "read_write"

    def label(self, text: str) -> None:
        """Add a description of the contents, for messages. The first few are kept."""
        if text and text not in self.labels and len(self.labels) < _LABELS:
            self.labels.append(text)

    def __str__(self) -> str:
        labels = "; ".join(self.labels)
        return f"segment {self.info.id} of {self.info.nbytes} bytes{f', with {labels}' if labels else ''}"

    @property
    def pooled(self) -> bool:
        """True if the bytes are reused after their reader has released them, so that they may not be shared again."""
        return self.info.arena

    @property
    def key(self) -> tuple[str, Access, int]:
        """The key in a :class:`MappingTable`."""
        return self.info.id, self.info.access, self.number

    def address_of(self, offset: int, nbytes: int, what: str = "storage") -> int:
        """Return the address of bytes.

        :raises CodecError: if they are not within the segment.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.info.nbytes:
            raise CodecError(f"a {what} of {nbytes} bytes at {offset} is not within its segment of {self.info.nbytes} bytes")
        return self.address + offset

    @property
    def objects(self) -> set[str]:
        """The ids of the server's objects that use the mapping; ``""`` for other users."""
        return {use.object_id for use in self.uses if use() is not None}

    def publish(self, access: Access) -> None:
        """Seal a segment made by this process, before it is first sent; see :meth:`Backend.seal`.

        The mapping itself stays writable.
        """
        if self.fresh and self.descriptor is not None:
            self.backend.seal(self.descriptor.fileno(), access)
            self.sealed = access != "read_write"
        self.fresh = False

    @property
    def may_change(self) -> bool:
        """True if another process may write to this host memory without an endpoint of this process having permitted it.

        This applies to the memory of a caller's argument or a buffer, because sealing does not end existing mappings. Memory
        made by this process has the access of its endpoint, and memory that a server published for reading is sealed.
        """
        return self.info.mechanism == "memfd" and not self.made and not (self.sealed and self.owner)


class MappingHold:
    """Strong reference to a mapping, kept by tensors and buffers over it. The use ends when the last of them is collected.

    ``object_id`` is the server's object that they belong to, ``""`` for none.
    """

    __slots__ = ("__weakref__", "mapping", "object_id")

    def __init__(self, mapping: Mapping, object_id: str) -> None:
        self.mapping = mapping
        self.object_id = object_id


class _Use(weakref.ref[MappingHold]):
    """Weak reference to a hold, with copies of its attributes: its callback ends the use."""

    __slots__ = ("mapping", "object_id")

    mapping: Mapping
    object_id: str

    # A weak reference gets its attributes after construction; see MappingTable._hold().


#: Seconds for which host memory stays mapped after its last user: a loop of calls for one object maps it once, and unmaps
#: unused memory at its own safe points instead of waking the finaliser thread.
_LINGER = 0.002
#: Ended uses of slabs that may wait for a drain.
_MANY = 1000

#: The attribute of a tensor's storage, or of a buffer, that keeps its hold.
_HELD = "_shared_rpc_hold"

#: The access with which private memory is mapped: each process copies it, and none may write to it.
_RIGHTS: dict[Access, Access] = {"private": "read"}

#: Accesses whose mappings are never vacated: a process may have several of each segment, or none after copying it.
_APART: frozenset[Access] = frozenset({"copy", "private"})


def _close(mapping: Mapping) -> None:
    descriptor, mapping.descriptor = mapping.descriptor, None
    if descriptor is not None:
        descriptor.close()


def _synchronize(mappings: Iterable[Mapping], what: str) -> None:
    """Synchronise the devices of mappings that will be unmapped.

    :raises CapabilityError: if one cannot be synchronised.
    """
    for backend, mapping in {mapping.backend: mapping for mapping in mappings}.items():
        if not backend.synchronize():
            raise CapabilityError(
                f"cannot {what} now: the wait for {mapping.info.device} failed, because a CUDA graph is being captured, or its "
                f"context is broken. {what.capitalize()} after the capture"
            )


class MappingTable:
    """All mappings of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._mappings: dict[tuple[str, Access, int], Mapping] = {}
        self._copies = itertools.count(1)
        #: Addresses in order, and the mapping at each. Replaced as a whole, so that readers need no lock.
        self._by_address: tuple[list[int], list[Mapping]] = ([], [])
        #: Uses whose holds were collected. ``_ended``: True if a mapping may have lost its last user.
        self._gone: deque[_Use] = deque()
        self._ended = False
        #: Held while mappings are vacated or mapped again: no memory is unmapped during that time.
        self.changing = fork_safe_lock()
        #: The monotonic time after which a job of the finaliser thread drains the table.
        self._lingers_until = 0.0
        #: Mappings without users, to be unmapped when the device can be synchronised.
        self._unused: dict[Mapping, None] = {}
        #: True if this process may publish every attached segment again: in a worker, an endpoint may return the result of
        #: another.
        self.keeps = False
        #: The slabs of the latest results, which stay mapped without users, see :meth:`keep_slab`.
        self._slabs: dict[Mapping, None] = {}
        #: The ids of suspended objects with living tensors in this process.
        self.suspended: frozenset[str] = frozenset()
        #: The number of vacated mappings.
        self._vacated = 0
        #: The socket, by server id, of each server whose memory is mapped here.
        self.servers: dict[str, str] = {}
        #: The sockets of this process's own servers.
        self.homes: set[str] = set()

    @contextmanager
    def create(self, nbytes: int, device: str, *, slab: bool = False, arena: bool = False) -> Iterator[Mapping]:
        """Allocate memory mapped for writing. It stays mapped during the block, and afterwards until its last user ends.

        :param slab: True if unrelated results share the segment. ``arena``: True if it belongs to a pool.
        """
        backend = backend_for(device)
        segment = backend.create(nbytes)
        if slab or arena:
            segment.info = msgspec.structs.replace(segment.info, slab=slab, arena=arena)
        pinned: list[Mapping] = []
        try:
            try:
                with self._lock:
                    mapping = self._add(segment, backend, pinned)
            except BaseException:
                segment.close()
                raise
            mapping.descriptor, mapping.made, mapping.fresh = segment, True, True
            yield mapping
        finally:
            self._unpin(pinned)

    @contextmanager
    def attach(
        self,
        segments: Sequence[Segment],
        *,
        keep: bool = False,
        owner: str = "",
        hidden: Collection[int] = (),
        label: str = "",
    ) -> Iterator[list[Mapping]]:
        """Map segments with the access in their infos. They stay mapped during the block, and then until their last user ends.

        The segments are borrowed.

        :param keep: keep a descriptor, so that this process can publish the memory again.
        :param owner: the id of the server that keeps the segments.
        :param hidden: the numbers of segments that :meth:`find` skips, as it skips copy-on-write mappings.
        :param label: a description of the contents, for messages.
        """
        mappings: list[Mapping] = []
        try:
            with self._lock:
                for number, segment in enumerate(segments):
                    mapping = self._attached(segment, mappings)
                    mapping.hidden = mapping.hidden or number in hidden or mapping.info.access == "copy"
                    mapping.owner = owner or mapping.owner
                    mapping.label(label)
                    if (keep or self.keeps) and not (mapping.pooled or mapping.hidden):
                        mapping.descriptor = mapping.descriptor or segment.duplicate()
            yield [*mappings]
        finally:
            self._unpin(mappings)

    def keep_slab(self, info: SegmentInfo) -> None:
        """Keep a result's slab mapped for later results in it, until :meth:`release_slabs` or until newer slabs replace it."""
        with self._lock:
            mapping = self._mappings.get((info.id, info.access, 0))
            if mapping is None or mapping in self._slabs:
                return
            self._slabs[mapping] = None
            if len(self._slabs) > KEPT_SLABS:
                oldest = next(iter(self._slabs))
                del self._slabs[oldest]
                self._retire_unused(oldest)
                self._ended = self._ended or bool(self._gone)

    def release_slabs(self) -> None:
        """Unmap slabs without users, at the end of a session."""
        with self._lock:
            slabs, self._slabs = self._slabs, {}
            for mapping in slabs:
                self._retire_unused(mapping)
            self._ended = self._ended or bool(self._gone)
        if self.has_unused:
            self.drain()

    def knows(self, info: SegmentInfo) -> bool:
        """Return True if a segment is mapped with the access in its info."""
        mapping = self._mappings.get((info.id, info.access, 0))
        return mapping is not None and not mapping.vacated

    def outdated(self, infos: Iterable[SegmentInfo]) -> bool:
        """Return True if one of these segments is mapped in an earlier incarnation only."""
        for info in infos:
            if "." not in info.id or info.access in _APART:  # the first incarnation
                continue
            with self._lock:
                mapped = {
                    mapping.info.id
                    for mapping in self._mappings.values()
                    if (mapping.info.name, mapping.info.access) == (info.name, info.access)
                }
            if mapped and info.id not in mapped:
                return True
        return False

    def of_objects(self, object_ids: Set[str]) -> dict[str, list[Mapping]]:
        """Return the mappings of objects, by object id, except those that :meth:`resume` never replaces."""
        found: dict[str, list[Mapping]] = {}
        with self._lock:
            for mapping in self._mappings.values():
                if not mapping.vacated and mapping.info.access not in _APART:
                    for object_id in object_ids & mapping.objects:
                        found.setdefault(object_id, []).append(mapping)
        return found

    def disown(self, segment_ids: Iterable[str]) -> int:
        """Clear the owner of segments that their server dropped; return how many had one."""
        gone = set(segment_ids)
        with self._lock:
            owned = [mapping for mapping in self._mappings.values() if mapping.owner and mapping.info.id in gone]
            for mapping in owned:
                mapping.owner = ""
            return len(owned)

    def _attached(self, segment: Segment, pinned: list[Mapping]) -> Mapping:
        """Return the mapping of a segment, pinned, and append it to ``pinned``; create it if necessary."""
        info = segment.info
        known = self._mappings.get((info.id, info.access, 0))
        if self._vacated and (known is None or known.vacated):
            known = self._filled(segment)
        if known is None:
            return self._add(segment, backend_for(info.device, info.mechanism), pinned)
        known.pins += 1
        pinned.append(known)
        return known

    def _add(self, segment: Segment, backend: Backend, pinned: list[Mapping]) -> Mapping:
        """Map a segment, under the table's lock. The mapping is pinned, and in ``pinned`` before a signal handler can raise."""
        info = segment.info
        if info.access == "copy" and info.mechanism != "memfd":
            raise CapabilityError(f"segment {info.id} on {info.device} cannot be mapped copy-on-write: only host memory can")
        number = next(self._copies) if info.access == "copy" else 0
        address = backend.map(segment.fileno(), info.nbytes, _RIGHTS.get(info.access, info.access))
        mapping = Mapping(info, address, backend, number=number, pins=1)
        key = mapping.key
        addresses, mapped = self._by_address
        place = bisect.bisect_right(addresses, address)
        self._by_address = ([*addresses[:place], address, *addresses[place:]], [*mapped[:place], mapping, *mapped[place:]])
        self._mappings[key] = mapping
        pinned.append(mapping)
        if info.access == "read" and info.device == "cpu":
            FAULTS.install()
        return mapping

    def keep_for(self, users: Iterable[tuple[Mapping, object]], object_id: str = "") -> None:
        """Keep each mapping until the paired object is collected. Call it while the mapping is being created or attached.

        The reference is an attribute of the object, at a tenth of the cost of a weak reference to the object.

        :param object_id: the server's object that they belong to, see :meth:`suspend`; ``""`` for none.
        """
        FINALIZER.start()
        holds: dict[Mapping, MappingHold] = {}
        for mapping, user in users:
            hold = holds.get(mapping)
            if hold is None:
                with self._lock:
                    hold = holds[mapping] = self._hold(mapping, object_id)
            user.__dict__[_HELD] = hold

    def hold(self, mapping: Mapping) -> MappingHold:
        """Return a strong reference to a mapping. Call it while the mapping is being created or attached."""
        FINALIZER.start()
        with self._lock:
            return self._hold(mapping, "")

    def _hold(self, mapping: Mapping, object_id: str) -> MappingHold:
        hold = MappingHold(mapping, object_id)
        use = _Use(hold, self._hold_gone)
        use.mapping, use.object_id = mapping, object_id
        mapping.uses.add(use)
        return hold

    def make_in_slab(
        self, info: SegmentInfo, make: Callable[[Mapping], T], object_id: str, owner: str = "", label: str = ""
    ) -> T | None:
        """Create an object over a kept slab with ``make``; return None if the slab is not kept. The object keeps the slab.

        Slabs are kept by :meth:`keep_slab`. For the other parameters see :meth:`attach` and :meth:`keep_for`.
        """
        with self._lock:
            mapping = self._mappings.get((info.id, info.access, 0))
            if mapping is None or mapping not in self._slabs or mapping.vacated or info.access in _APART:
                return None
            if self.keeps and mapping.descriptor is None:
                return None
            hold = self._hold(mapping, object_id)
        made = make(mapping)
        made.__dict__[_HELD] = hold
        mapping.owner = owner or mapping.owner
        mapping.label(label)
        return made

    def object_of(self, user: object) -> str:
        """Return the id of the server's object that a storage or buffer belongs to, ``""`` if unknown."""
        hold: MappingHold | None = user.__dict__.get(_HELD)
        return hold.object_id if hold is not None else ""

    def _hold_gone(self, use: _Use) -> None:
        # Runs in a finaliser: it may only enqueue.
        self._gone.append(use)
        if use.mapping in self._slabs and len(self._gone) < _MANY:
            return  # the slab stays mapped: the next drain ends the use
        self._ended = True
        now = time.monotonic()
        if use.mapping.backend.unmaps_in_background and now >= self._lingers_until:
            self._lingers_until = now + _LINGER
            FINALIZER.submit(self._drain_in_background, after=_LINGER)

    # Suspended objects.

    def suspend(self, object_id: str, in_use: Callable[[], bool] = lambda: False) -> bool:
        """Suspend an object: unmap segments whose objects are all suspended, and reserve their addresses.

        A segment used by other objects, or by a block, stays mapped until these uses end, and one that cannot be unmapped after
        another one was, until the next safe point. Copy-on-write mappings stay, because pages written by this process exist
        only there.

        :param in_use: called once the object is in :attr:`suspended`; if it returns True, the object is not suspended.
        :returns: True if it is suspended now.
        :raises CapabilityError: if its memory cannot be mapped again at its address, or its device cannot be synchronised, as
            during the capture of a CUDA graph. Nothing has changed then.
        """
        with self.changing:
            self._end_uses()
            before, suspended = self.suspended, False
            self.suspended = before | {object_id}
            try:
                if not in_use():
                    with self._lock:
                        for mapping in self._mappings.values():
                            if not mapping.backend.vacates and object_id in mapping.objects:
                                mapping.backend.vacate(mapping.address, mapping.info.nbytes)  # raises the reason
                        due = [mapping for mapping in self._mappings.values() if self._is_due(mapping)]
                    self._vacate(due)
                    suspended = True
            finally:
                if not suspended:
                    self.suspended = before
            self._forget_ended()
        return suspended

    def resume(
        self,
        object_id: str,
        segments: Sequence[Segment],
        owner: str = "",
        activate: Callable[[], object] = lambda: None,
    ) -> None:
        """Map the memory of an object again, at its addresses. No other thread can suspend it before ``activate()`` returns.

        If an earlier incarnation of a segment is still mapped, because other objects use it too, the new one replaces it. The
        segments are borrowed.

        :param segments: the object's current segments.
        :param owner: see :meth:`attach`.
        :raises CapabilityError: if the memory cannot be mapped, or the device not be synchronised. Nothing has changed then.
        :raises ProtocolError: if there is no segment for some of its memory.
        """
        by_name = {(segment.info.name, segment.info.access): segment for segment in segments}
        with self.changing:
            with self._lock:
                places = [
                    (mapping, by_name.get((mapping.info.name, mapping.info.access)))
                    for mapping in self._mappings.values()
                    if mapping.info.access not in _APART and object_id in mapping.objects
                ]
            new: list[tuple[Mapping, Segment]] = []
            for mapping, segment in places:
                if segment is None or segment.info.nbytes != mapping.info.nbytes:
                    raise ProtocolError(f"the server did not send the memory of object {object_id} for {mapping}")
                if mapping.vacated or mapping.info.id != segment.info.id:
                    new.append((mapping, segment))
            _synchronize([mapping for mapping, _ in new if not mapping.vacated], "resume")
            try:
                for mapping, segment in new:
                    with self._lock:
                        self._fill(mapping, segment, owner)
            except BaseException:
                self._vacate_late(lambda backend: backend.synchronize())
                raise
            activate()
            self.suspended -= {object_id}

    def _is_due(self, mapping: Mapping) -> bool:
        """Return True if a mapping can be vacated: all its objects are suspended, and no block uses it."""
        if mapping.vacated or mapping.pins or mapping.pooled or mapping.info.access in _APART or not mapping.backend.vacates:
            return False
        objects = mapping.objects
        return bool(objects) and objects <= self.suspended

    def _vacate(self, due: Sequence[Mapping]) -> None:
        """Unmap mappings.

        An error is raised only before any of them is unmapped. After that, one that cannot be unmapped is left to the next
        safe point: its object must become suspended, because only a resumption maps the others again.
        """
        _synchronize(due, "suspend")
        unmapped = False
        for mapping in due:
            with self._lock:
                if not self._is_due(mapping):  # another thread's block may have attached it
                    continue
                try:
                    self._vacate_one(mapping)
                    unmapped = True
                except (CapabilityError, RuntimeError) as error:
                    if not unmapped or raised_by_handler(error):
                        raise
                    # As text: the error's traceback would keep objects for as long as a log keeps the record.
                    _log.error("memory of a suspended object stays mapped: %s: %s", mapping, str(error))

    def _vacate_one(self, mapping: Mapping) -> None:
        """Unmap under the table's lock, so that no thread attaches to the mapping."""
        mapping.vacated = True  # before: an interrupted call may have unmapped the memory
        self._vacated += 1
        if mapping.info.device == "cpu":
            FAULTS.install()
        try:
            mapping.backend.vacate(mapping.address, mapping.info.nbytes)
        except (CapabilityError, RuntimeError) as error:
            if not raised_by_handler(error):  # else it may have come afterwards
                mapping.vacated = False
                self._vacated -= 1
            raise
        if mapping.descriptor is not None:
            mapping.descriptor.close()

    def _filled(self, segment: Segment) -> Mapping | None:
        """Map a segment at the address of a vacated incarnation of it; return None if there is none."""
        for mapping in self._mappings.values():
            if mapping.vacated and (mapping.info.name, mapping.info.access) == (segment.info.name, segment.info.access):
                self._fill(mapping, segment)
                return mapping
        return None

    def _fill(self, mapping: Mapping, segment: Segment, owner: str = "") -> None:
        """Map a segment at a mapping's address, under the table's lock."""
        info = segment.info
        if info.nbytes != mapping.info.nbytes:
            raise ProtocolError(f"segment {info.id} has {info.nbytes} bytes, but replaces {mapping}")
        if not mapping.vacated and not mapping.backend.replaces:
            self._vacate_one(mapping)
        taken = self._mappings.get((info.id, info.access, 0))
        number = 0 if taken is None or taken is mapping else next(self._copies)
        mapping.backend.map(segment.fileno(), info.nbytes, _RIGHTS.get(info.access, info.access), mapping.address)
        del self._mappings[mapping.key]
        self._vacated -= mapping.vacated
        mapping.info, mapping.number, mapping.vacated = info, number, False
        mapping.owner = owner or mapping.owner
        self._mappings[mapping.key] = mapping
        if mapping.descriptor is not None:
            mapping.descriptor.close()
            mapping.descriptor = segment.duplicate()

    def _vacate_late(self, may_unmap: Callable[[Backend], bool]) -> None:
        """Vacate mappings of suspended objects that were in use then, or were filled by a :meth:`resume` that failed."""
        with self._lock:
            late = [mapping for mapping in self._mappings.values() if self._is_due(mapping)]
        late = [mapping for mapping in late if may_unmap(mapping.backend)]
        try:
            self._vacate(late)
        except Exception:
            _log.exception("memory of a suspended object stays mapped: %s", "; ".join(map(str, late)))

    def _forget_ended(self) -> None:
        """Forget suspended objects without living tensors in this process."""
        with self._lock:
            self.suspended &= {object_id for mapping in self._mappings.values() for object_id in mapping.objects}

    # Looking up.

    def find(self, address: int) -> tuple[Mapping, int] | None:
        """Return the mapping that holds ``address`` and the offset in it, in bytes; None for hidden ones too.

        :raises HandleSuspended: if the mapping is vacated, because the caller is about to use the memory.
        """
        found = self._at(address)
        if found is None or found[0].hidden:
            return None
        mapping, _ = found
        if mapping.vacated:
            raise HandleSuspended(
                f"a tensor lies in {mapping}, which this process has suspended: resume() the object's handle first, or use its "
                f"tensors in a block 'with handle.active():'"
            )
        return found

    def _at(self, address: int) -> tuple[Mapping, int] | None:
        addresses, mapped = self._by_address
        index = bisect.bisect_right(addresses, address) - 1
        if index < 0 or address - addresses[index] >= mapped[index].info.nbytes:
            return None
        return mapped[index], address - addresses[index]

    def _target(self, address: int) -> Target | None:
        """Return the inaccessible or read-only host memory at an address. The driver reports faults of GPU memory."""
        found = self._at(address)
        if found is None or found[0].info.device != "cpu" or not (found[0].vacated or found[0].info.access == "read"):
            return None
        return Target(str(found[0]), found[1], found[0].vacated)

    @property
    def has_unused(self) -> bool:
        """True if :meth:`drain` has work, as far as is known without waiting."""
        return bool(self._unused or self._ended)

    def drain(self) -> None:
        """Unmap unused segments, after waiting for the device: a safe point. Never called in a finaliser.

        Segments of a device that cannot be synchronised stay mapped until the next safe point.
        """
        self._drain(lambda backend: backend.synchronize())

    def _drain_in_background(self) -> None:
        self._drain(lambda backend: backend.unmaps_in_background)

    def _drain(self, may_unmap: Callable[[Backend], bool]) -> None:
        # One drain at a time, so that the memory is released when any drain returns.
        with self.changing:
            self._end_uses()
            if self.suspended:
                self._forget_ended()
                self._vacate_late(may_unmap)
            self._unmap(may_unmap)

    def _end_uses(self) -> None:
        """End the uses of collected objects. A use stays in the queue until it is ended, and may be ended twice."""
        with self._lock:
            self._ended = False
            while self._gone:
                use = self._gone[0]
                use.mapping.uses.discard(use)  # an interrupted caller's use is not in the set
                self._retire_unused(use.mapping)
                if self._gone and self._gone[0] is use:  # else a drain of a signal handler has ended it
                    del self._gone[0]

    def _unpin(self, mappings: list[Mapping]) -> None:
        """End pins of mappings, and empty the list."""
        try:
            with self._lock:
                while mappings:
                    self._retire_unused(mappings[-1], pins=1)
                    mappings[-1].pins -= 1
                    del mappings[-1]
        except BaseException:  # of a signal handler
            self._unpin(mappings)
            raise
        if self._unused:
            self.drain()

    def _retire_unused(self, mapping: Mapping, pins: int = 0) -> None:
        """Move a mapping to the unused ones, if it has no users: except ``pins`` that end now."""
        key, before, after = mapping.key, None, self._by_address
        while True:
            if mapping.pins > pins or mapping.uses or mapping in self._slabs:
                return
            if key not in self._mappings or self._mappings[key] is not mapping:
                return
            if self._by_address is before:
                break
            before = self._by_address
            mapped = [other for other in before[1] if other is not mapping]
            after = [other.address for other in mapped], mapped
        # No call from the checks on, at which a signal handler could raise, or change the table.
        self._by_address = after
        del self._mappings[key]
        self._unused[mapping] = None
        self._vacated -= mapping.vacated

    def _unmap(self, may_unmap: Callable[[Backend], bool]) -> None:
        # Without the table's lock: a running kernel must not hold up other threads. The device is waited for on behalf of these
        # mappings only, and not of those that become unused in the meantime.
        unused = [*self._unused]
        ready = {backend for backend in {mapping.backend for mapping in unused} if may_unmap(backend)}
        for mapping in unused:
            if mapping.backend in ready and mapping in self._unused:  # else a drain of a signal handler has unmapped it
                del self._unused[mapping]  # before: a second attempt might unmap another mapping at that address
                undo = mapping.backend.free_range if mapping.vacated else mapping.backend.unmap
                undo(mapping.address, mapping.info.nbytes)
                _close(mapping)

    def __len__(self) -> int:
        return len(self._mappings) + len(self._unused)

    def _after_fork(self) -> None:
        # Host mappings are inherited, but the parent's publications are not the child's.
        self._gone = deque()
        self._lingers_until = 0.0  # the finaliser thread's jobs are the parent's
        for mapping in (*self._mappings.values(), *self._unused):
            _close(mapping)
        for mapping in self._mappings.values():
            if mapping.info.device != "cpu":
                mapping.pins += 1  # CUDA does not work in a forked child: the parent's mappings are never touched
            for use in mapping.uses:
                if use() is None:  # the parent's finaliser thread had not yet ended this use
                    self._gone.append(use)
        self._ended = bool(self._gone)
        self._unused = {mapping: None for mapping in self._unused if mapping.info.device == "cpu"}
        self._slabs = {}


MAPPINGS = MappingTable()
FAULTS = FaultHandler(MAPPINGS._target)
after_fork(MAPPINGS._after_fork)
