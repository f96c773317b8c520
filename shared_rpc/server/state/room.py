"""Requests for room on devices: who waits, whose turn it is, and what gives way.

A request is for memory that is to be kept, or for an object that is to be on its devices. Rules:

- Requests are served in the order in which they came, device by device. One that waits for a device holds up all later ones
  for that device, those too that need no room: so the objects in use come to rest, and nobody is passed over for ever.
- With the first request for an object all that wait for it are granted. Those that come later stand in line again.
- What nobody uses gives way, the least recently used first; objects that a request waits for go last. Nothing gives way unless
  all of it together is enough.
- An object goes to the nearest place below that has room for it. On the host, copies of objects that are on their devices
  give way first, and then the objects that lie there, to files. An object that can go nowhere is dropped.
- A request that could not be granted if everything gave way, pinned objects excepted, is refused.

The line decides, and its driver carries out: it asks for :meth:`RoomLine.next` until there is nothing left to do, and does
each thing, or begins it, before it asks for the next one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from shared_rpc.server.state.clock import Clock

__all__ = [
    "BELOW",
    "Below",
    "Decision",
    "DropCopies",
    "DropObjects",
    "EvictObjects",
    "Evictable",
    "Grant",
    "HostCopies",
    "Occupancy",
    "Refuse",
    "Reservation",
    "RoomLine",
    "RoomRequest",
    "Whereabouts",
]

W = TypeVar("W")

#: Seconds after which an object is moved again whose move failed: a disk may have been full.
_RETRY_AFTER = 5.0

#: A place below a device, where the bytes of an object can lie.
Below = Literal["host", "file"]
#: Those places, the nearest first.
BELOW: tuple[Below, ...] = ("host", "file")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The bytes of an object by device, and those of them that are not there."""

    sizes: Mapping[str, int]
    missing: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Evictable:
    """Objects that nobody uses, and that can leave their devices together, because they share memory.

    ``frees`` is in bytes by device. ``below`` has the places that they can go to, the nearest first; without one they are
    dropped. ``host_bytes`` is what they take in host copies if they go there, and ``host_ready`` what of it is allocated
    already: copies with earlier bytes count, because they are written to again.
    """

    objects: tuple[str, ...]
    frees: Mapping[str, int]
    below: tuple[Below, ...] = ()
    host_bytes: int = 0
    host_ready: int = 0


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Host copies of objects. ``cold``: the objects lie there, and can only go to files."""

    objects: tuple[str, ...]
    nbytes: int
    cold: bool


class Occupancy(Protocol):
    """The places of a server's objects. They are listed in order of the last use, the least recently used first."""

    def used(self, device: str) -> int:
        """Return the bytes of a device that objects take."""

    def pinned(self, device: str) -> int:
        """Return the bytes of a device that pinned objects take."""

    def whereabouts(self, object_id: str) -> Whereabouts | None:
        """Describe an object; None if it does not exist."""

    def evictable(self) -> Iterable[Evictable]:
        """List what can leave its devices: neither used nor pinned, and not on its way."""

    def host_used(self) -> int:
        """Return the bytes of all host copies, and those reserved for copies that the line did not order."""

    def host_copies(self) -> Iterable[HostCopies]:
        """List the host copies that can be dropped, and those that can go to files; none of objects on their way."""


@dataclass(eq=False, slots=True)
class RoomRequest(Generic[W]):
    """One request for room; ``waiter`` belongs to the driver.

    :param sizes: bytes by device, of memory that is to be kept.
    :param object_id: instead, the object that is to be on its devices.
    """

    waiter: W
    sizes: Mapping[str, int] = field(default_factory=dict)
    object_id: str = ""
    #: When it got in line, on the line's clock.
    since: float = 0.0


@dataclass(eq=False, slots=True)
class Reservation:
    """Bytes by device that were granted, and that no object takes yet; for an object that is to be there, its id."""

    sizes: dict[str, int]
    object_id: str = ""


@dataclass(frozen=True, slots=True)
class Grant(Generic[W]):
    """An order to serve requests: they are out of line. The reservation, if there is one, is to be redeemed."""

    requests: tuple[RoomRequest[W], ...]
    reservation: Reservation | None


@dataclass(frozen=True, slots=True)
class Refuse(Generic[W]):
    """An order to refuse a request: it is out of line. Beside ``pinned`` bytes, a device has no room for so many."""

    request: RoomRequest[W]
    device: str
    nbytes: int
    limit: int
    pinned: int


@dataclass(frozen=True, slots=True)
class EvictObjects:
    """An order to move objects to a place below, from their devices or from the host; its end is told to the line."""

    objects: tuple[str, ...]
    to: Below


@dataclass(frozen=True, slots=True)
class DropObjects:
    """An order to drop objects at once."""

    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropCopies:
    """An order to drop the host copies of objects at once, which are on their devices."""

    objects: tuple[str, ...]


Decision = Grant[W] | Refuse[W] | EvictObjects | DropObjects | DropCopies


@dataclass(frozen=True, slots=True)
class _Move:
    """A move under way: the bytes by device, and those of host copies, that it will free, and those that it takes there."""

    frees: Mapping[str, int]
    host_frees: int
    host_takes: int


class RoomLine(Generic[W]):
    """The requests for room of a server; ``W`` is the type of their waiters.

    :param limits: bytes by device. What has no limit has room for everything.
    :param host_limit: bytes of host copies, None for no limit.
    """

    def __init__(self, occupancy: Occupancy, clock: Clock, limits: Mapping[str, int], host_limit: int | None = None) -> None:
        self.limits: Mapping[str, int] = limits
        self.host_limit = host_limit
        self._occupancy = occupancy
        self._clock = clock
        #: Requests in line, the first one first.
        self._line: OrderedDict[RoomRequest[W], None] = OrderedDict()
        self._reserved: Counter[str] = Counter()
        #: Objects that are being brought to their devices.
        self._arriving: dict[str, Reservation] = {}
        #: Moves under way, by their objects.
        self._moves: dict[tuple[str, ...], _Move] = {}
        #: Objects that could not be moved: until when they are left alone, and why.
        self._failed: dict[str, tuple[float, str]] = {}

    # What the driver tells.

    def enter(self, request: RoomRequest[W], *, first: bool = False) -> None:
        """Get a request in line.

        :param first: before all others, because its turn had come already.
        """
        request.since = self._clock.now()
        self._line[request] = None
        if first:
            self._line.move_to_end(request, last=False)

    def leave(self, request: RoomRequest[W]) -> bool:
        """Take a request out of line that is not wanted any more; False if it was in none."""
        if request not in self._line:
            return False
        del self._line[request]
        return True

    def redeem(self, reservation: Reservation) -> None:
        """Note that reserved memory is an object's now, or that it was not made."""
        self._reserved.subtract(reservation.sizes)
        reservation.sizes = {}
        if self._arriving.get(reservation.object_id) is reservation:
            del self._arriving[reservation.object_id]

    def moved(self, objects: tuple[str, ...]) -> None:
        """Note that objects are where they were ordered to go."""
        self._moves.pop(objects, None)
        for object_id in objects:
            self._failed.pop(object_id, None)

    def failed(self, objects: tuple[str, ...], why: str, again: float = _RETRY_AFTER) -> None:
        """Note that objects could not go where they were ordered to, and are left alone for ``again`` seconds."""
        self._moves.pop(objects, None)
        until = self._clock.now() + again
        for object_id in objects:
            self._failed[object_id] = until, why

    def expire(self) -> float | None:
        """Forget failures that are long ago; return the seconds until the next one is, None for never."""
        now = self._clock.now()
        self._failed = {object_id: failure for object_id, failure in self._failed.items() if failure[0] > now}
        return min((until - now for until, _ in self._failed.values()), default=None)

    # What it knows.

    def reserved(self, device: str) -> int:
        """Return the bytes of a device that were granted, and that no object takes yet."""
        return self._reserved[device]

    def waits(self, object_id: str) -> bool:
        """Return whether a request for an object would wait behind others."""
        found = self._occupancy.whereabouts(object_id) if self._line else None
        return found is not None and any(self.needs(request).keys() & found.sizes.keys() for request in self._line)

    def needs(self, request: RoomRequest[W]) -> dict[str, int]:
        """Return the bytes that a request needs, by each device with a limit that it has to do with.

        An object that is gone needs nothing: whoever asked for it will find that out.
        """
        sizes, missing = request.sizes, request.sizes
        if request.object_id:
            found = self._occupancy.whereabouts(request.object_id)
            if found is None:
                return {}
            sizes, missing = found.sizes, {} if request.object_id in self._arriving else found.missing
        return {device: missing.get(device, 0) for device, nbytes in sizes.items() if nbytes and device in self.limits}

    def host_ordered(self) -> int:
        """Return the bytes of host copies that ordered moves make."""
        return sum(move.host_takes for move in self._moves.values())

    def ahead(self, request: RoomRequest[W]) -> int:
        """Return how many requests are in line before one."""
        return list(self._line).index(request)

    def failures(self) -> dict[str, str]:
        """Return why objects could not be moved, by object."""
        return {object_id: why for object_id, (_, why) in self._failed.items()}

    def refusal(self, request: RoomRequest[W]) -> Refuse[W] | None:
        """Return why a request can never be granted, if that is so."""
        for device, nbytes in self.needs(request).items():
            limit, pinned = self.limits[device], self._occupancy.pinned(device)
            if nbytes > 0 and nbytes + pinned > limit:
                return Refuse(request, device, nbytes, limit, pinned)
        return None

    def __len__(self) -> int:
        return len(self._line)

    # What is to be done.

    def next(self) -> Decision[W] | None:
        """Return the next thing to do, None if there is nothing before somebody tells something."""
        held_up: set[str] = set()
        for request in self._line:
            if held_up >= self.limits.keys():
                return None
            needs = self.needs(request)
            if held_up.isdisjoint(needs):
                decision = self.refusal(request)
                if decision is not None:
                    del self._line[request]
                    return decision
                served = self._serve(request, needs)
                if served is not None:
                    return served
            held_up |= needs.keys()
        return None

    def _serve(self, request: RoomRequest[W], needs: Mapping[str, int]) -> Decision[W] | None:
        """Return what is to be done for the first request in a line, None if it has to wait."""
        if any(request.object_id in objects for objects in self._moves):
            return None  # it is on its way down, and comes back from there
        lack = {device: nbytes - self._free(device) for device, nbytes in needs.items() if nbytes > self._free(device)}
        # An object that is there needs no room, however full its devices are.
        lack = {device: nbytes for device, nbytes in lack.items() if needs[device]}
        if not lack:
            return self._grant(request, needs)
        for move in self._moves.values():
            lack = {device: nbytes - move.frees.get(device, 0) for device, nbytes in lack.items()}
        lack = {device: nbytes for device, nbytes in lack.items() if nbytes > 0}
        plan = self._plan(lack) if lack else None
        return self._begin(plan) if plan is not None else None

    def _free(self, device: str) -> int:
        return self.limits[device] - self._occupancy.used(device) - self._reserved[device]

    def _grant(self, request: RoomRequest[W], needs: Mapping[str, int]) -> Grant[W]:
        joins = request.object_id
        served = [other for other in self._line if other is request or (joins and other.object_id == joins)]
        for other in served:
            del self._line[other]
        reservation = Reservation({device: nbytes for device, nbytes in needs.items() if nbytes}, request.object_id)
        if not reservation.sizes:
            return Grant(tuple(served), None)
        self._reserved.update(reservation.sizes)
        if request.object_id:
            self._arriving[request.object_id] = reservation
        return Grant(tuple(served), reservation)

    def _plan(self, lack: Mapping[str, int]) -> list[tuple[Evictable, Below | None]] | None:
        """Choose what gives way, and where each goes; None if all of it is not enough."""
        left, room = dict(lack), self._obtainable()
        plan: list[tuple[Evictable, Below | None]] = []
        for one in self._waited_for_last(self._occupancy.evictable()):
            if not any(nbytes > 0 and one.frees.get(device) for device, nbytes in left.items()):
                continue
            fits = [to for to in one.below if to != "host" or room is None or one.host_bytes <= room]
            if one.below and not fits:
                continue
            to = fits[0] if fits else None
            if to == "host" and room is not None:
                room -= one.host_bytes
            plan.append((one, to))
            left = {device: nbytes - one.frees.get(device, 0) for device, nbytes in left.items()}
            if all(nbytes <= 0 for nbytes in left.values()):
                return plan
        return None

    def _obtainable(self) -> int | None:
        """Return the bytes that host copies can have if all gives way that may, None for no limit."""
        if self.host_limit is None:
            return None
        return self._host_free() + self._host_coming() + sum(copies.nbytes for copies in self._movable_copies())

    def _host_free(self) -> int:
        return (self.host_limit or 0) - self._occupancy.host_used() - self.host_ordered()

    def _host_coming(self) -> int:
        return sum(move.host_frees for move in self._moves.values())

    def _movable_copies(self) -> list[HostCopies]:
        return [copies for copies in self._occupancy.host_copies() if self._failed.keys().isdisjoint(copies.objects)]

    def _waited_for_last(self, found: Iterable[Evictable]) -> list[Evictable]:
        wanted = {request.object_id for request in self._line}
        movable = [one for one in found if self._failed.keys().isdisjoint(one.objects)]
        return sorted(movable, key=lambda one: not wanted.isdisjoint(one.objects))

    def _begin(self, plan: list[tuple[Evictable, Below | None]]) -> Decision[W] | None:
        """Return the first thing of a plan that can be done now; None if all of it waits for room on the host."""
        ahead = 0
        for one, to in plan:
            if to is None:
                return DropObjects(one.objects)
            needs = one.host_bytes - one.host_ready if to == "host" else 0
            if not needs or self.host_limit is None or ahead + needs <= self._host_free():
                return self._move(one.objects, to, _Move(one.frees, 0, needs))
            ahead += needs
            if ahead > self._host_free() + self._host_coming():
                return self._make_host_room({name for other, _ in plan if other.host_ready for name in other.objects})
        return None

    def _make_host_room(self, spared: set[str]) -> Decision[W] | None:
        """Drop a copy on the host, or move an object from there to a file."""
        wanted = {request.object_id for request in self._line}
        found = [copies for copies in self._movable_copies() if spared.isdisjoint(copies.objects)]
        for copies in sorted(found, key=lambda copies: (copies.cold, not wanted.isdisjoint(copies.objects))):
            if not copies.cold:
                return DropCopies(copies.objects)
            return self._move(copies.objects, "file", _Move({}, copies.nbytes, 0))
        return None

    def _move(self, objects: tuple[str, ...], to: Below, move: _Move) -> EvictObjects:
        self._moves[objects] = move
        return EvictObjects(objects, to)
