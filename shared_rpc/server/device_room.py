"""Room on the devices of a server: set aside for who asks for it, at once or when others have given way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shared_rpc.errors import CapabilityError, ServerBusy, SharedRPCError
from shared_rpc.execution.outcomes import Failure
from shared_rpc.memory.records import Record
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.server.state.clock import Clock
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.state.quotas import Quotas
from shared_rpc.server.state.room import (
    Below,
    DropCopies,
    DropObjects,
    Evictable,
    Grant,
    HostCopies,
    Refuse,
    Reservation,
    RoomLine,
    RoomRequest,
    Whereabouts,
)
from shared_rpc.server.state.tiers import STALE

__all__ = ["Room", "SetAside", "TierMover"]

_log = logging.getLogger("shared_rpc.server")

#: Seconds after which an object is moved again whose move failed: because somebody used it meanwhile, or for another reason.
_AGAIN_SOON, _AGAIN = 0.1, 5.0
#: Holders, and other things, that an error lists.
_SHOWN = 5


@dataclass(eq=False, slots=True)
class SetAside:
    """Bytes, by device, and descriptors that are set aside until they are an object's."""

    promised: dict[str, int] = field(default_factory=dict)
    descriptors: int = 0
    reservation: Reservation | None = None


@dataclass(eq=False, slots=True)
class _Asker:
    """One who waits for room."""

    owner: Hashable
    granted: Callable[[SetAside], None]
    refused: Callable[[Failure], None]
    aside: SetAside


class TierMover(Protocol):
    """The moves of a server's objects between tiers."""

    def users(self, stored: StoredObject) -> Sequence[str]:
        """Return the sessions that use an object: it cannot leave its devices."""

    def is_moving(self, stored: StoredObject) -> bool:
        """Return whether an object is on its way to another tier, or about to be."""

    def below(self, group: Sequence[StoredObject]) -> tuple[Below, ...]:
        """Return the tiers below the one of a group that it can go to, the nearest first."""

    def host_takes(self) -> int:
        """Return the bytes of host copies that are reserved for moves which :meth:`make_room` did not begin."""

    def make_room(self, group: Sequence[StoredObject], to: Below) -> None:
        """Begin to move a group down, whose end is told to :meth:`Room.moved` or :meth:`Room.not_moved`."""


class Room:
    """Room on a server's devices. On its loop only.

    Where a quota has none left, a server that refuses drops cached objects without holders, if that is enough, or refuses. One
    that evicts has requests wait in line, see :mod:`shared_rpc.server.state.room`.

    :param wake_within: called when something has to be looked at again in so many seconds.
    :param pid_of: the process behind a session, for people.
    :param mover: returns the one that moves objects between tiers.
    """

    def __init__(
        self,
        objects: ObjectStore,
        leases: LeaseTable,
        quotas: Quotas,
        clock: Clock,
        wake_within: Callable[[float], None],
        pid_of: Callable[[str], int],
        mover: Callable[[], TierMover],
        *,
        when_full: Literal["evict", "refuse"] = "refuse",
        host_quota: int | None = None,
    ) -> None:
        self._objects = objects
        self._leases = leases
        self._quotas = quotas
        self._wake_within = wake_within
        self._pid_of = pid_of
        self._mover = mover
        self._host_quota = host_quota
        self._places = _Places(objects, leases, quotas, mover)
        self._line: RoomLine[_Asker] | None = None
        if when_full == "evict":
            self._line = RoomLine(self._places, clock, quotas.limits, host_quota)
        self._asked: dict[Hashable, RoomRequest[_Asker]] = {}
        #: Whether it carries out what the line decides, and whether it will soon.
        self._working = self._called = False
        self._stopped = False

    @property
    def waits(self) -> bool:
        """Whether requests wait, and are not refused."""
        return self._line is not None

    def used(self, device: str) -> int:
        """Return the bytes of a device that objects take, or that are set aside for them."""
        return self._quotas.used(device) + (self._line.reserved(device) if self._line is not None else 0)

    def limit(self, device: str) -> int | None:
        """Return the quota of a device in bytes, None where there is none."""
        return self._quotas.limit(device)

    def needs_of(self, record: Record) -> tuple[dict[str, int], int]:
        """Return what a record would add to the objects that are there: bytes by device, and descriptors."""
        new = {segment.info.id: segment.info for segment in record.segments if self._objects.segment(segment.info.id) is None}
        return _by_device(new), len(new)

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replace the quotas; objects that exceed one stay until there is a need for room."""
        self._quotas.set_limits(limits)
        if self._line is not None:
            self._line.limits = self._quotas.limits
            self.changed()

    def ask(
        self,
        owner: Hashable,
        sizes: Mapping[str, int],
        granted: Callable[[SetAside], None],
        refused: Callable[[Failure], None],
        *,
        descriptors: int = 0,
        totals: Mapping[str, int] | None = None,
        first: bool = False,
    ) -> None:
        """Ask for room for memory. One of the callbacks is called once, perhaps before this returns, or ``owner`` leaves.

        :param sizes: bytes by device, that are about to be made, or are made.
        :param granted: gets what was set aside, which is to be redeemed.
        :param refused: gets why there is no room; a request that could be granted later waits instead.
        :param descriptors: how many the memory will have.
        :param totals: the memory of devices, which is the limit where there is no quota; by default there is none then.
        :param first: before all who wait, because the turn of ``owner`` had come already.
        """
        self._ask(owner, sizes, "", granted, refused, descriptors, totals or {}, first=first)

    @contextlib.asynccontextmanager
    async def reserve(
        self, owner: Hashable, sizes: Mapping[str, int], *, descriptors: int = 0, totals: Mapping[str, int] | None = None
    ) -> AsyncIterator[None]:
        """Have room for memory set aside for the time of the block, which is entered when there is some; see :meth:`ask`.

        :raises CapabilityError: if there can never be so much.
        :raises ServerBusy: if there is none, and requests do not wait.
        """
        future: asyncio.Future[SetAside] = asyncio.get_running_loop().create_future()

        def refused(failure: Failure) -> None:
            assert failure.error is not None, "a failure of this process has its exception"
            future.set_exception(failure.error)

        self.ask(owner, sizes, future.set_result, refused, descriptors=descriptors, totals=totals)
        try:
            aside = await future
        except asyncio.CancelledError:
            if not self.leave(owner) and future.done() and not future.cancelled() and future.exception() is None:
                self.redeem(future.result())
            raise
        try:
            yield
        finally:
            self.redeem(aside)

    def ask_for(
        self,
        owner: Hashable,
        stored: StoredObject,
        granted: Callable[[SetAside], None],
        refused: Callable[[Failure], None],
        *,
        first: bool = False,
    ) -> None:
        """Ask for an object to be on its devices, in a server where requests wait; see :meth:`ask`.

        Where a reservation comes with what is set aside, ``owner`` is to have the object restored. Else it is there, or on its
        way up for another one.
        """
        # Objects that share memory are one to the line.
        name = min(member.object_id for member in self._objects.group(stored))
        self._ask(owner, {}, name, granted, refused, 0, {}, first=first)

    def take(self, sizes: Mapping[str, int], descriptors: int) -> SetAside:
        """Set room aside that is there now.

        :raises CapabilityError: if there can never be so much.
        :raises ServerBusy: if there is none now.
        """
        aside = SetAside()
        try:
            for device, nbytes in sizes.items():
                self._quotas.promise(device, nbytes)
                aside.promised[device] = nbytes
            self.add_descriptors(aside, descriptors)
        except SharedRPCError:
            self.redeem(aside)
            raise
        return aside

    def add_descriptors(self, aside: SetAside, count: int) -> None:
        """Set descriptors aside too.

        :raises ServerBusy: if there are none.
        """
        self._quotas.require_descriptors(count)
        self._objects.descriptors.used += count
        aside.descriptors += count

    def must_wait(self, session: str, stored: StoredObject) -> bool:
        """Return whether a session that is to use an object has to ask for it, because others wait for room where it is.

        One that uses it already is never held up.
        """
        if self._line is None or not self._asked or session in self._leases.active(stored.object_id):
            return False
        return self._line.waits(stored.object_id)

    def require_copies(self, descriptors: int, host_nbytes: int) -> None:
        """Check that there is room for copies that are made ahead of their need: nothing is dropped for them.

        :raises ServerBusy: if there is none.
        """
        self._quotas.require_descriptors(descriptors)
        if self._host_quota is not None and self._host_used() + host_nbytes > self._host_quota:
            raise ServerBusy(f"{host_nbytes} bytes of host copies do not fit: the limit is {self._host_quota}")

    def require_host(self, nbytes: int, spared: Collection[StoredObject]) -> None:
        """Check that there is room for host copies; those of objects that are on their devices are dropped for it.

        :param spared: objects whose copies stay.
        :raises ServerBusy: if there is none now.
        """
        if self._host_quota is None:
            return
        names = {stored.object_id for stored in spared}
        droppable = [one for one in self._places.host_copies() if not one.cold and names.isdisjoint(one.objects)]
        used = self._host_used()
        excess = used + nbytes - self._host_quota
        if excess > sum(one.nbytes for one in droppable):
            raise ServerBusy(
                f"{nbytes} bytes of host copies do not fit: the limit (--host-quota, or Server(host_quota=...)) is "
                f"{self._host_quota}, and {used} are in use or reserved. Restore or drop objects that are there, or move them "
                f"to files"
            )
        for one in droppable:
            if excess > 0:
                self._drop_copies(one.objects)
                excess -= one.nbytes

    def _host_used(self) -> int:
        """Return the bytes of all host copies, and those that moves under way will make."""
        return self._places.host_used() + (self._line.host_ordered() if self._line is not None else 0)

    def drop_stale_copies(self, nbytes: int, spared: Collection[StoredObject]) -> bool:
        """Drop stale host copies until so many bytes of them are gone; return whether any is.

        :param spared: objects whose copies stay.
        """
        dropped = 0
        names = {stored.object_id for stored in spared}
        for one in self._places.host_copies():
            if dropped < nbytes and not one.cold and names.isdisjoint(one.objects) and self._is_stale(one.objects):
                self._drop_copies(one.objects)
                dropped += one.nbytes
        return dropped > 0

    def _is_stale(self, object_ids: tuple[str, ...]) -> bool:
        copies = [self._objects.copies.get(name, "host") for name in _infos(self._all(object_ids))]
        return all(copy is None or copy.revision == STALE for copy in copies)

    def moved(self, objects: tuple[str, ...]) -> None:
        """Note that objects are where :meth:`TierMover.make_room` was to move them."""
        if self._line is not None:
            self._line.moved(objects)
            self.changed()

    def not_moved(self, objects: tuple[str, ...], error: SharedRPCError) -> None:
        """Note that objects could not be moved: they are tried again, soon where that was because somebody used them."""
        if self._line is not None:
            again = _AGAIN_SOON if isinstance(error, ServerBusy) else _AGAIN
            self._line.failed(objects, str(error), again)
            self._wake_within(again)
            self.changed()

    def _ask(
        self,
        owner: Hashable,
        sizes: Mapping[str, int],
        object_id: str,
        granted: Callable[[SetAside], None],
        refused: Callable[[Failure], None],
        descriptors: int,
        totals: Mapping[str, int],
        *,
        first: bool,
    ) -> None:
        aside = SetAside()
        try:
            # Where there is a line, it has the devices with a quota.
            at_once = sizes if self._line is None else {name: sizes[name] for name in sizes.keys() - self._line.limits.keys()}
            for device, nbytes in at_once.items():
                self._quotas.promise(device, nbytes, totals.get(device))
                aside.promised[device] = nbytes
            self.add_descriptors(aside, descriptors)
            if self._line is not None:
                request = RoomRequest(_Asker(owner, granted, refused, aside), sizes, object_id)
                self._check(request)
        except SharedRPCError as error:
            self.redeem(aside)
            refused(Failure.of(error))
            return
        if self._line is None:
            granted(aside)
        else:
            self._asked[owner] = request
            self._objects.contended = True
            self._line.enter(request, first=first)
            self._work()

    def leave(self, owner: Hashable) -> bool:
        """Forget a request that is not wanted any more; False if there is none."""
        request = self._asked.get(owner)
        if request is None or self._line is None:
            return False
        self._forget(request)
        self._line.leave(request)
        self.redeem(request.waiter.aside)
        self.changed()
        return True

    def redeem(self, aside: SetAside) -> None:
        """Note that memory for which room was set aside is an object's now, or was not made."""
        self._objects.descriptors.used -= aside.descriptors
        for device, nbytes in aside.promised.items():
            self._quotas.redeem(device, nbytes)
        aside.descriptors, aside.promised = 0, {}
        if aside.reservation is not None and self._line is not None:
            self._line.redeem(aside.reservation)
            self.changed()

    def changed(self) -> None:
        """Look soon whether there is room now: something is used no more, or has gone."""
        if self._asked and not self._working and not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._work)

    def expire(self) -> float | None:
        """Look again at what could not be moved; return the seconds until the next time, None for never."""
        if self._line is None:
            return None
        left = self._line.expire()
        self._work()
        return left

    def stop(self) -> None:
        """Grant nothing any more; those who wait are told by others."""
        self._stopped = True

    def why(self, owner: Hashable, users: dict[str, str] | None = None) -> str:
        """Return what a request waits for, and who holds it, for people; ``""`` if it does not wait.

        :param users: the descriptions of who holds what, by device, for those who ask for many requests at once.
        """
        users = {} if users is None else users
        request = self._asked.get(owner)
        if request is None or self._line is None:
            return ""
        for device in self._line.needs(request):
            if device not in users:
                users[device] = self._users(device)
        wants = [
            f"{nbytes} bytes on {device} wait for room: {self._quotas.limit(device)} is the quota (--quota, or "
            f"Server(quotas=...)), and {self.used(device)} are in use: {users[device]}"
            for device, nbytes in self._line.needs(request).items()
        ]
        ahead = self._line.ahead(request)
        texts = [*wants, *([f"{ahead} requests are before this one"] if ahead else []), *self._failures()]
        return f"{'. '.join(texts)}. Suspend or release handles, free buffers, or ask for less"

    def _users(self, device: str) -> str:
        """Describe who holds what on a device, the largest first."""
        held: list[tuple[int, str]] = []
        for stored in self._objects:
            nbytes = _bytes_on(stored, device)
            if nbytes:
                held.append((nbytes, f"{nbytes} bytes are {_named(stored)}, {self._state(stored)}"))
        held.sort(key=lambda entry: -entry[0])
        more = [f"{len(held) - _SHOWN} smaller ones"] if len(held) > _SHOWN else []
        reserved = self.used(device) - sum(nbytes for nbytes, _ in held)
        coming = [f"{reserved} bytes are set aside for what is being made"] if reserved > 0 else []
        return "; ".join([*(text for _, text in held[:_SHOWN]), *more, *coming]) or "by nobody"

    def _state(self, stored: StoredObject) -> str:
        active = self._leases.active(stored.object_id)
        pids = sorted({self._pid_of(session) for session in self._mover().users(stored)})
        if pids:
            return f"which pid {', '.join(map(str, pids[:_SHOWN]))} {'uses' if len(pids) == 1 else 'use'}"
        if stored.pinned:
            return "which is pinned"
        holders = sorted({self._pid_of(session) for session in self._leases.holders(stored.object_id) - active})
        if holders:
            return f"which pid {', '.join(map(str, holders[:_SHOWN]))} suspended"
        if self._mover().is_moving(stored):
            return "which is being moved"
        return "which a task keeps until it is fetched" if active else "which nobody uses"

    def _failures(self) -> Iterator[str]:
        assert self._line is not None, "only a server that evicts fails to"
        for object_id, why in list(self._line.failures().items())[:_SHOWN]:
            yield f"object {object_id} could not be moved: {why}"

    def __len__(self) -> int:
        """Count the requests that wait."""
        return len(self._asked)

    # The line.

    def _check(self, request: RoomRequest[_Asker]) -> None:
        """Check that a request can be granted some time.

        :raises CapabilityError: if it is larger than a quota.
        :raises ServerBusy: if it has no room beside pinned objects.
        """
        assert self._line is not None, "only a server that evicts has a line"
        refusal = self._line.refusal(request)
        if refusal is not None:
            raise self._error_of(refusal)

    def _error_of(self, refusal: Refuse[_Asker]) -> SharedRPCError:
        device, nbytes, limit = refusal.device, refusal.nbytes, refusal.limit
        if nbytes > limit:
            return CapabilityError(
                f"{nbytes} bytes on {device} are more than the quota (--quota, or Server(quotas=...)), {limit}: ask for less"
            )
        pinned = [_named(stored) for stored in self._objects if stored.pinned and _bytes_on(stored, device)]
        return ServerBusy(
            f"{nbytes} bytes on {device} have no room beside what is pinned there: the quota (--quota, or "
            f"Server(quotas=...)) is {limit}, and {refusal.pinned} bytes are {', '.join(pinned[:_SHOWN])}. Invalidate and "
            f"release these, or pin less"
        )

    def _work(self) -> None:
        """Carry out what the line decides, until there is nothing left to do."""
        self._called = False
        if self._line is None or self._working or self._stopped:
            return
        self._working = True
        try:
            while (decision := self._line.next()) is not None:
                if isinstance(decision, Grant):
                    self._grant(decision)
                elif isinstance(decision, Refuse):
                    asker = self._forget(decision.request)
                    self.redeem(asker.aside)
                    self._tell(functools.partial(asker.refused, Failure.of(self._error_of(decision))))
                elif isinstance(decision, DropObjects):
                    self._drop(decision.objects)
                elif isinstance(decision, DropCopies):
                    self._drop_copies(decision.objects)
                else:
                    self._mover().make_room(self._all(decision.objects), decision.to)
        finally:
            self._working = False
        left = self._line.expire()
        if left is not None:
            self._wake_within(left)

    def _grant(self, grant: Grant[_Asker]) -> None:
        """Set room aside for the first of some requests; the others of its object wait for that."""
        for number, request in enumerate(grant.requests):
            asker = self._forget(request)
            if number == 0:
                asker.aside.reservation = grant.reservation
            self._tell(functools.partial(asker.granted, asker.aside))

    def _forget(self, request: RoomRequest[_Asker]) -> _Asker:
        self._asked.pop(request.waiter.owner, None)
        self._objects.contended = bool(self._asked)
        return request.waiter

    def _tell(self, call: Callable[[], None]) -> None:
        """Call one who waited: an error of one must not affect the others."""
        try:
            call()
        except Exception:
            _log.exception("the callback of a request for room failed")

    def _drop(self, object_ids: tuple[str, ...]) -> None:
        for stored in self._all(object_ids):
            self._objects.unlist(stored)

    def _drop_copies(self, object_ids: tuple[str, ...]) -> None:
        for stored in self._all(object_ids):
            for segment in stored.record.segments:
                self._objects.copies.discard(segment.info.id, "host")

    def _all(self, object_ids: tuple[str, ...]) -> list[StoredObject]:
        return [stored for object_id in object_ids if (stored := self._objects.get(object_id)) is not None]


class _Places:
    """The places of a server's objects, for its line: an :class:`~shared_rpc.server.state.room.Occupancy`."""

    def __init__(self, objects: ObjectStore, leases: LeaseTable, quotas: Quotas, mover: Callable[[], TierMover]) -> None:
        self._objects = objects
        self._leases = leases
        self._quotas = quotas
        self._mover = mover

    def used(self, device: str) -> int:
        return self._quotas.used(device)

    def pinned(self, device: str) -> int:
        pinned = _infos(stored for stored in self._objects if stored.pinned and not stored.cold)
        return sum(info.nbytes for info in pinned.values() if info.device == device)

    def whereabouts(self, object_id: str) -> Whereabouts | None:
        stored = self._objects.get(object_id)
        if stored is None:
            return None
        sizes = _by_device(_infos(self._objects.group(stored)))
        return Whereabouts(sizes, sizes if stored.cold else {})

    def evictable(self) -> Iterator[Evictable]:
        mover = self._mover()
        for group in self._groups():
            if group[0].cold or any(mover.is_moving(stored) for stored in group):
                continue
            below, infos, names = mover.below(group), _infos(group), tuple(stored.object_id for stored in group)
            if below and any(mover.users(stored) or stored.pinned for stored in group):
                continue
            if below:
                total = sum(info.nbytes for info in infos.values())
                ready = sum(info.nbytes for info in infos.values() if self._objects.copies.get(info.id, "host") is not None)
                yield Evictable(names, _by_device(infos), below, total, ready)
            elif all(map(self._is_droppable, group)):
                yield Evictable(names, _by_device(infos))
            else:
                yield from self._parts(group)

    def _parts(self, group: Sequence[StoredObject]) -> Iterator[Evictable]:
        """Yield those of a group that can be dropped, with the memory that is theirs alone."""
        users = Counter(name for stored in group for name in _infos([stored]))
        for stored in filter(self._is_droppable, group):
            alone = {name: info for name, info in _infos([stored]).items() if users[name] == 1}
            if alone:
                yield Evictable((stored.object_id,), _by_device(alone))

    def _is_droppable(self, stored: StoredObject) -> bool:
        cached = stored.listed and stored.cache_key is not None
        return cached and not stored.pinned and not self._leases.held(stored.object_id)

    def host_used(self) -> int:
        return self._objects.copies.nbytes("host") + self._mover().host_takes()

    def host_copies(self) -> Iterator[HostCopies]:
        mover, copies = self._mover(), self._objects.copies
        for group in self._groups() if self.host_used() else ():
            if any(mover.is_moving(stored) for stored in group):
                continue
            found = [copy for name in _infos(group) if (copy := copies.get(name, "host")) is not None]
            names, nbytes = tuple(stored.object_id for stored in group), sum(copy.segment.info.nbytes for copy in found)
            if found and not group[0].cold:
                yield HostCopies(names, nbytes, cold=False)
            elif found and "file" in mover.below(group):
                yield HostCopies(names, nbytes, cold=True)

    def _groups(self) -> Iterator[list[StoredObject]]:
        """Yield all objects that have memory or copies, with those that share it; those that were used last come last."""
        seen: set[str] = set()
        groups = []
        for stored in self._objects:
            if stored.object_id not in seen and stored.record.segments:
                groups.append(self._objects.group(stored))
                seen.update(member.object_id for member in groups[-1])
        yield from sorted(groups, key=lambda group: max(stored.last_accessed_at for stored in group))


def _infos(group: Iterable[StoredObject]) -> dict[str, SegmentInfo]:
    """Return the segments of objects, by id."""
    return {segment.info.id: segment.info for stored in group for segment in stored.record.segments}


def _by_device(infos: Mapping[str, SegmentInfo]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for info in infos.values():
        sizes[info.device] += info.nbytes
    return dict(sizes)


def _bytes_on(stored: StoredObject, device: str) -> int:
    """Return the bytes that an object takes on a device."""
    return 0 if stored.cold else _by_device(_infos([stored])).get(device, 0)


def _named(stored: StoredObject) -> str:
    """Return an object's name for people."""
    return f"object {stored.object_id} of {stored.endpoint}()" if stored.kind == "result" else f"buffer {stored.object_id}"
