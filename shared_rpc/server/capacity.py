"""Capacity of a server's devices, and of its host for copies: reservations, the queue of requests, and evictions.

Everything that takes memory reserves it here: results, buffers, restored objects and host copies. Rules:

- Requests are served in order of arrival, device by device. A request that waits for a device blocks all later ones for that
  device, including those that need no memory. This prevents starvation: no later request overtakes an earlier one, and an
  object in constant use becomes idle.
- The first request granted for an object grants all pending ones for it. Later ones queue again.
- Unused objects are evicted, the least recently used first and those with a pending request last. Nothing is evicted unless
  all of it together suffices.
- An object moves to the nearest lower tier with capacity for it. On the host, copies of objects that are on their devices
  are dropped first; then host-tier objects move to files. An object without a lower tier is dropped.
- A request is refused if evicting everything that is not pinned would not suffice. A server that does not evict refuses it
  if dropping cached objects without holders would not suffice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import anyio

from shared_rpc.errors import CapabilityError, ServerBusy, SharedRPCError
from shared_rpc.memory.records import Record
from shared_rpc.observability.events import MoveReason
from shared_rpc.protocol.records import Tier
from shared_rpc.server.state import Clock
from shared_rpc.server.state.leases import Holder, LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject, infos_of, usage_of
from shared_rpc.server.state.tiers import STALE

_log = logging.getLogger("shared_rpc.server")

#: The host memory of copies: treated as a device here, whose quota is the host quota.
HOST = "host copies"
#: Seconds before a failed move is retried: if the object was used during the move, and otherwise.
_AGAIN_SOON, _AGAIN = 0.1, 5.0
#: Number of holders, and of other items, listed in an error.
_SHOWN = 5
_QUOTA, _ALL = "the quota (--quota, or Server(quotas=...))", "the device's memory"
_HOST_QUOTA = "the limit (--host-quota, or Server(host_quota=...))"


class Reservation:
    """Bytes reserved by device until they belong to an object. As a context manager it releases them on exit."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._taken: Counter[str] = Counter()

    def take(self, sizes: Mapping[str, int]) -> None:
        """Reserve bytes."""
        self._taken.update(sizes)
        self._capacity._taken.update(sizes)

    def release(self) -> None:
        """End the reservation: an object owns the memory now, or it was never allocated. Idempotent."""
        if self._taken:
            self._capacity._taken.subtract(self._taken)
            self._taken.clear()
            self._capacity.changed()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class Move:
    """A move of a group of objects to another tier, or a copy of it for a later one; each object has at most one.

    ``over`` is set at its end, and ``error`` is then the reason if it failed.
    """

    group: Sequence[StoredObject]
    to: Tier
    #: The direction of the objects, ``""`` for a copy; and the reason of the move.
    direction: Literal["up", "down", ""]
    reason: MoveReason = "capacity"
    #: When it began, on the clock of :func:`time.monotonic`.
    began: float = field(default_factory=time.monotonic)
    #: Bytes by device that it will free.
    frees: Counter[str] = field(default_factory=Counter)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    cancelled: bool = False
    done: int = 0
    total: int = 0
    #: The copy in progress.
    copying: anyio.CancelScope | None = None
    #: Host memory reserved for its copies, until they are made.
    host: Reservation | None = None

    def cancel(self) -> None:
        """Stop copying and abandon the move."""
        self.cancelled = True
        if self.copying is not None:
            self.copying.cancel()

    def note(self, done: int, total: int) -> None:
        """Record the progress, from any thread."""
        self.done, self.total = done, total


class CapacityRequest(Reservation):
    """One request, queued until it is granted: for ``sizes``, in bytes by device, or for an object to be on its devices.

    It reserves bytes on devices without a quota at once, and the others when it is granted. ``patient`` is True if it waits
    even though evicting everything would not suffice.
    """

    def __init__(
        self, capacity: Capacity, owner: Hashable, sizes: Mapping[str, int], stored: StoredObject | None, patient: bool
    ) -> None:
        super().__init__(capacity)
        self.owner, self.sizes, self.stored, self.patient = owner, sizes, stored, patient
        self.granted = False
        self.changed = asyncio.Event()

    async def wait(self) -> CapacityRequest:
        """Wait until it is granted. It leaves the queue on refusal or cancellation."""
        try:
            while not self.granted:
                await self.changed.wait()
                self.changed.clear()
                self._capacity._serve(self)
        except BaseException:
            self._capacity._leave(self)
            raise
        return self


class _Candidate(NamedTuple):
    """Objects that share memory, and the bytes freed by moving them to a tier of ``below``; if that is empty, by dropping them,
    or only their host ``copies``.

    ``host_bytes`` is the size that they would have as host copies.
    """

    group: Sequence[StoredObject]
    frees: Mapping[str, int]
    below: tuple[Tier, ...] = ()
    host_bytes: int = 0
    copies: bool = False


class Capacity:
    """The capacity of a server's devices. On its loop only.

    A dropped object's memory counts as free at once, though freeing it may take time: see
    :func:`~shared_rpc.execution.device_memory.until_freed`.

    :param wake_within: called with the seconds after which :meth:`expire` must be called.
    :param pid_of: returns the process behind a session, for error texts.
    :param limits: the quotas in bytes, by device.
    :param when_full: whether requests without capacity wait for evictions, or are refused.
    :param host_quota: maximum bytes of host copies, None for any amount.
    """

    def __init__(
        self,
        objects: ObjectStore,
        leases: LeaseTable,
        clock: Clock,
        wake_within: Callable[[float], None],
        pid_of: Callable[[Holder], int],
        limits: Mapping[str, int],
        *,
        when_full: Literal["evict", "refuse"] = "refuse",
        host_quota: int | None = None,
    ) -> None:
        self._objects = objects
        self._leases = leases
        self._clock = clock
        self._wake_within = wake_within
        self._pid_of = pid_of
        #: Active moves, by their objects.
        self.moves: dict[str, Move] = {}
        #: Objects about to be sent, with their number of uses. They stay on their devices until then.
        self.kept: Counter[str] = Counter()
        #: Returns the lower tiers that a group can move to, nearest first.
        self.below: Callable[[Sequence[StoredObject]], tuple[Tier, ...]]
        #: Begins to move a group down. Errors are reported to :meth:`failed`.
        self.begin_eviction: Callable[[Sequence[StoredObject], Tier], None]
        self._host_limit = host_quota
        self.evicts = when_full == "evict"
        #: Reserved bytes, by device.
        self._taken: Counter[str] = Counter()
        #: Pending requests in order. The tiers' own, for host copies, have no owner.
        self._queue: OrderedDict[CapacityRequest, None] = OrderedDict()
        #: Objects whose move failed: the time until which they are skipped, and the reason.
        self._failed: dict[str, tuple[float, str]] = {}
        self._waking = False
        self.set_limits(limits)

    # Amounts.

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replace the quotas; objects that exceed one stay until a request needs their memory."""
        self._limits = dict(limits)
        if self._host_limit is not None:
            self._limits[HOST] = self._host_limit
        self.changed()

    def limit(self, device: str) -> int | None:
        """Return the quota of a device in bytes, None for no limit."""
        return self._limits.get(device)

    @property
    def unlimited(self) -> bool:
        """True if no memory is limited, so that no object need be evicted."""
        return not self._limits and self._objects.max_bytes is None

    def used(self, device: str) -> int:
        """Return the bytes of a device that are used by objects or reserved."""
        taken = self._objects.copies.nbytes("host") if device == HOST else self._objects.used(device)
        return taken + self._taken[device]

    def needs_of(self, record: Record) -> tuple[dict[str, int], int]:
        """Return the additional memory that a record needs, in bytes by device, and its additional descriptors."""
        new = {segment.info.id: segment.info for segment in record.segments if self._objects.segment(segment.info.id) is None}
        return usage_of(new), len(new)

    def _free(self, device: str) -> int:
        return self._limits[device] - self.used(device)

    # Reservations.

    def take(self, sizes: Mapping[str, int], totals: Mapping[str, int] | None = None) -> Reservation:
        """Reserve memory that is available now, dropping cached objects without holders if necessary.

        :raises CapabilityError: if there can never be that much.
        :raises ServerBusy: if there is too little now.
        """
        reservation = Reservation(self)
        self._take(reservation, sizes, totals)
        return reservation

    def _take(self, reservation: Reservation, sizes: Mapping[str, int], totals: Mapping[str, int] | None) -> None:
        try:
            for device, nbytes in sizes.items():
                self._require(device, nbytes, (totals or {}).get(device))
                reservation.take({device: nbytes})
        except SharedRPCError:
            reservation.release()
            raise

    def has_host(self, nbytes: int) -> bool:
        """Return True if further host copies fit without dropping or moving others."""
        return HOST not in self._limits or nbytes <= self._free(HOST)

    def drop_stale_copies(self, nbytes: int) -> bool:
        """Drop stale host copies until ``nbytes`` are freed; return True if any was dropped."""
        return self._drop_copies(nbytes, [one for one in self._droppable_copies() if self._is_stale_copy(one)])

    def _droppable_copies(self) -> list[_Candidate]:
        """Return the host copies that can be dropped, stale ones first."""
        return self._requested_last(one for one in self._host_copies() if one.copies)

    def _drop_copies(self, nbytes: int, found: Iterable[_Candidate]) -> bool:
        """Drop host copies until ``nbytes`` are freed; return True if any was dropped."""
        dropped = 0
        for one in found:
            if dropped < nbytes:
                dropped += one.frees[HOST]
                for name in infos_of(one.group):
                    self._objects.copies.discard(name, "host")
        return dropped > 0

    def _is_stale_copy(self, one: _Candidate) -> bool:
        copies = [self._objects.copies.get(name, "host") for name in infos_of(one.group)]
        return one.copies and all(copy is None or copy.revision == STALE for copy in copies)

    # The queue.

    def request(
        self,
        owner: Hashable,
        sizes: Mapping[str, int],
        stored: StoredObject | None = None,
        *,
        totals: Mapping[str, int] | None = None,
        first: bool = False,
        patient: bool = True,
    ) -> CapacityRequest:
        """Queue a request, unless it is granted or refused at once. Await its :meth:`~CapacityRequest.wait`.

        :param owner: identifies the request, see :meth:`why`.
        :param sizes: bytes by device, allocated or about to be.
        :param stored: an object to be restored or used, instead of sizes. The reservation is for restoring it: it is empty if
            the object is on its devices, or being restored for another request.
        :param totals: the memory of devices, the limit of those without a quota; by default they have no limit.
        :param first: go before all pending requests, because they may wait for memory that the caller uses.
        :param patient: False to be refused if evicting everything would not suffice now.
        :raises CapabilityError: if there can never be that much.
        :raises ServerBusy: if there is none and requests do not wait, or if pinned objects leave too little.
        """
        request = CapacityRequest(self, owner, sizes, stored, patient)
        if not self.evicts:
            self._take(request, sizes or self._needs(request, limited=False), totals)
            request.granted = True
            return request
        self._take(request, {name: sizes[name] for name in sizes.keys() - self._limits.keys()}, totals)
        try:
            self._check(self._needs(request))
            self._queue[request] = None
            if first:
                self._queue.move_to_end(request, last=False)
            self._serve(request)
        except SharedRPCError:
            self._leave(request)
            raise
        return request

    def _leave(self, request: CapacityRequest) -> None:
        """Remove a request that is refused or cancelled."""
        self._queue.pop(request, None)
        request.release()
        self.changed()

    def __len__(self) -> int:
        """Return the number of pending requests that have an owner."""
        return sum(request.owner is not None for request in self._queue)

    def changed(self) -> None:
        """Schedule a check for capacity, after an object became idle or was dropped."""
        if self._queue and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = False
        held_up: set[str] = set()
        for request in self._queue:
            if held_up >= self._limits.keys():
                return
            needs = self._needs(request)
            if held_up.isdisjoint(needs):
                request.changed.set()
            held_up |= needs.keys()

    def failed(self, group: Sequence[StoredObject], error: SharedRPCError) -> None:
        """Record that objects could not be moved: they are retried, soon if the reason was that they were in use."""
        again = _AGAIN_SOON if isinstance(error, ServerBusy) else _AGAIN
        for stored in group:
            self._failed[stored.object_id] = self._clock.now() + again, str(error)
        self._wake_within(again)
        self.changed()

    def expire(self) -> float | None:
        """Forget old failures; return the seconds until the next one expires, None for never."""
        now, before = self._clock.now(), len(self._failed)
        self._failed = {name: failure for name, failure in self._failed.items() if failure[0] > now}
        if len(self._failed) < before:
            self.changed()
        return min((until - now for until, _ in self._failed.values()), default=None)

    def must_wait(self, session: str, stored: StoredObject) -> bool:
        """Return True if a session must request an object before using it, because others wait for capacity on its device.

        A session that already uses it is never blocked.
        """
        if not self._queue or session in self._leases.active(stored.object_id):
            return False
        devices = usage_of(infos_of(self._objects.group(stored))).keys()
        return any(self._needs(request).keys() & devices for request in self._queue)

    def _needs(self, request: CapacityRequest, *, limited: bool = True) -> dict[str, int]:
        """Return the bytes that a request needs, for each device that concerns it, or only for those with a quota.

        A dropped object needs nothing: the request for it will fail.
        """
        sizes, missing = request.sizes, request.sizes
        if request.stored is not None:
            if self._objects.get(request.stored.object_id) is not request.stored:
                return {}
            sizes = usage_of(infos_of(self._objects.group(request.stored)))
            move = self.move_of(request.stored)
            missing = {} if not request.stored.cold or (move is not None and move.direction == "up") else sizes
        devices = [device for device, nbytes in sizes.items() if nbytes and (device in self._limits or not limited)]
        return {device: missing.get(device, 0) for device in devices}

    def _serve(self, request: CapacityRequest) -> None:
        """Grant a request if it is its turn and there is capacity; otherwise begin evictions for it.

        :raises ServerBusy, CapabilityError: if it is refused.
        """
        for earlier in self._queue:
            if earlier is request:
                break
            if not self._needs(earlier).keys().isdisjoint(self._needs(request)):
                return
        while not request.granted:
            needs = self._needs(request)
            self._check(needs)
            move = self.move_of(request.stored) if request.stored is not None else None
            if move is not None and move.direction == "down":
                return  # it is restored from there
            # An object that is on its device needs no capacity, however full that is.
            lack = Counter({device: nbytes - self._free(device) for device, nbytes in needs.items() if nbytes})
            if not +lack:
                self._grant(request, needs)
                return
            lack -= self._freed_by_moves()
            if not lack:
                return
            if not self._begin_evictions(lack):
                if not request.patient:
                    raise ServerBusy(f"there is no capacity for {lack.total()} bytes of host copies now")
                return

    def _grant(self, request: CapacityRequest, needs: Mapping[str, int]) -> None:
        joining = [other for other in self._queue if other.stored is not None and other.stored is request.stored]
        for other in {request, *joining}:
            other.granted = True
            other.changed.set()
            self._queue.pop(other, None)
        request.take(+Counter(needs))
        self.changed()

    def _check(self, needs: Mapping[str, int]) -> None:
        """Check that a request can be granted at some time.

        :raises CapabilityError: if it is larger than a quota.
        :raises ServerBusy: if pinned objects leave too little.
        """
        for device, nbytes in needs.items():
            limit = self._limits[device]
            pinned = [stored for stored in self._objects if stored.pinned and not stored.cold]
            kept = usage_of(infos_of(pinned)).get(device, 0)
            _check_size(device, nbytes, _QUOTA, limit)
            if nbytes > 0 and nbytes + kept > limit:
                names = [_named(stored) for stored in pinned if _bytes_on(stored, device)]
                raise ServerBusy(
                    f"{nbytes} bytes on {device} exceed the quota left by pinned objects: {_QUOTA} is {limit}, and {kept} "
                    f"bytes are {', '.join(names[:_SHOWN])}. Invalidate and release these, or pin fewer objects"
                )

    # Evictions.

    def move_of(self, stored: StoredObject) -> Move | None:
        """Return the move of an object, or of one that shares its memory."""
        if not self.moves:
            return None
        return next((self.moves[one.object_id] for one in self._objects.group(stored) if one.object_id in self.moves), None)

    def _is_moving(self, stored: StoredObject) -> bool:
        return stored.object_id in self.moves or (stored.object_id in self.kept and not stored.cold)

    def _freed_by_moves(self) -> Counter[str]:
        return sum((move.frees for move in set(self.moves.values())), Counter())

    def _begin_evictions(self, lack: Mapping[str, int]) -> bool:
        """Begin evictions from devices, or from the host if the lack is there; return False if all of them do not suffice."""
        left, on_host = Counter(lack), HOST in lack
        host = None if on_host else self._obtainable()
        plan: list[tuple[_Candidate, Tier | None]] = []
        for one in self._requested_last(self._host_copies() if on_host else self._candidates()):
            if not left:
                break
            if not any(one.frees.get(device) for device in left):
                continue
            fits = [to for to in one.below if to != "host" or host is None or one.host_bytes <= host]
            if one.below and not fits:
                continue
            to = fits[0] if fits else None
            if to == "host" and host is not None:
                host -= one.host_bytes
            plan.append((one, to))
            left -= Counter(one.frees)
        if left:
            return False
        for one, to in plan:
            if to is not None:
                self.begin_eviction(one.group, to)
            elif one.copies:
                self._drop_copies(one.frees[HOST], [one])
            else:
                for stored in one.group:
                    self._objects.unlist(stored)
        return True

    def _obtainable(self) -> int | None:
        """Return the maximum bytes of host copies after all possible evictions, None for no limit."""
        if self._host_limit is None:
            return None
        waiting = sum(request.sizes.get(HOST, 0) for request in self._queue)
        copies = sum(one.frees[HOST] for one in self._requested_last(self._host_copies()))
        return self._free(HOST) - waiting + self._freed_by_moves()[HOST] + copies

    def _requested_last(self, found: Iterable[_Candidate]) -> list[_Candidate]:
        """Return the candidates that can be moved now: stale copies, other copies, and last objects with a pending request."""
        wanted = {request.stored for request in self._queue}
        movable = [one for one in found if not any(stored.object_id in self._failed for stored in one.group)]
        return sorted(movable, key=lambda one: (not self._is_stale_copy(one), not one.copies, not wanted.isdisjoint(one.group)))

    def _candidates(self) -> Iterator[_Candidate]:
        """Yield the candidates on devices: neither used nor pinned nor being moved."""
        for group in self._groups():
            if group[0].cold or any(map(self._is_moving, group)):
                continue
            below, infos = self.below(group), infos_of(group)
            if below and any(self._leases.users(stored.object_id) or stored.pinned for stored in group):
                continue
            if below:
                yield _Candidate(group, usage_of(infos), below, sum(info.nbytes for info in infos.values()))
            elif all(map(self._is_droppable, group)):
                yield _Candidate(group, usage_of(infos))
            else:
                yield from self._parts(group)

    def _parts(self, group: Sequence[StoredObject]) -> Iterator[_Candidate]:
        """Yield the droppable objects of a group, with the memory that only they use."""
        users = Counter(name for stored in group for name in infos_of([stored]))
        for stored in filter(self._is_droppable, group):
            alone = {name: info for name, info in infos_of([stored]).items() if users[name] == 1}
            if alone:
                yield _Candidate([stored], usage_of(alone))

    def _is_droppable(self, stored: StoredObject) -> bool:
        cached = stored.listed and stored.cache_key is not None
        return cached and not stored.pinned and not self._leases.held(stored.object_id)

    def _host_copies(self) -> Iterator[_Candidate]:
        """Yield the host copies that can be dropped or moved to files, except those of objects that are being moved."""
        copies = self._objects.copies
        for group in self._groups() if copies.nbytes("host") else ():
            if any(map(self._is_moving, group)):
                continue
            found = [copy for name in infos_of(group) if (copy := copies.get(name, "host")) is not None]
            nbytes = sum(copy.segment.info.nbytes for copy in found)
            if found and not group[0].cold:
                yield _Candidate(group, {HOST: nbytes}, copies=True)
            elif found and "file" in self.below(group):
                yield _Candidate(group, {HOST: nbytes}, ("file",))

    def _groups(self) -> list[list[StoredObject]]:
        """Return all objects with memory or copies, in groups that share it, the most recently used last."""
        seen: set[str] = set()
        groups = []
        for stored in self._objects:
            if stored.object_id not in seen and stored.record.segments:
                groups.append(self._objects.group(stored))
                seen.update(member.object_id for member in groups[-1])
        return sorted(groups, key=lambda group: max(stored.last_accessed_at for stored in group))

    # Requirements of a server that refuses.

    def _require(self, device: str, nbytes: int, total: int | None) -> None:
        quota = self._limits.get(device)
        if quota is not None and (total is None or quota <= total):
            limit, what = quota, _HOST_QUOTA if device == HOST else _QUOTA
        elif total is not None:
            limit, what = total, _ALL
        else:
            return
        _check_size(device, nbytes, what, limit)
        excess = self.used(device) + nbytes - limit
        if nbytes == 0 or excess <= 0:
            return
        if device == HOST:
            droppable = self._droppable_copies()
            if excess > sum(one.frees[HOST] for one in droppable):
                raise ServerBusy(
                    f"{nbytes} bytes of host copies do not fit: {what} is {limit}, and {self.used(HOST)} are in use or "
                    f"reserved. Restore or drop objects that are there, or move them to files"
                )
            self._drop_copies(excess, droppable)
        elif not self._objects.drop_idle(excess, device):
            raise ServerBusy(
                f"{nbytes} bytes on {device} do not fit: {what} is {limit}, and {self.used(device)} are in use: "
                f"{self._users(device)}. Release handles, free buffers, or ask for less"
            )

    def require_descriptors(self, count: int) -> None:
        """Check that objects may have ``count`` more descriptors.

        :raises ServerBusy: if they may not.
        """
        descriptors = self._objects.descriptors
        if count and not descriptors.admit_objects():
            raise ServerBusy(
                f"keeping the object needs {count} more file descriptors, and three quarters of the {descriptors.available()} "
                f"of the process are in use, also by cached results that no process uses: nothing is evicted for this. "
                f"Invalidate cached results, release handles, fetch results of tasks, free buffers, or raise the limit "
                f"(ulimit -n, LimitNOFILE= of a service)"
            )

    # Reasons for waiting.

    def why(self, owner: Hashable, users: dict[str, str] | None = None) -> str:
        """Describe the capacity that a request waits for and its holders, for error texts; ``""`` if it does not wait.

        :param users: a cache of the holders' descriptions by device, for callers with many requests.
        """
        users = {} if users is None else users
        asked = [request for request in self._queue if request.owner is not None]
        request = next((request for request in asked if request.owner == owner), None)
        if request is None:
            return ""
        needs = self._needs(request)
        for device in needs.keys() - users.keys():
            users[device] = self._users(device)
        wants = [
            f"{nbytes} bytes on {device} wait for capacity: {self._limits[device]} is {_QUOTA}, and {self.used(device)} are in "
            f"use: {users[device]}"
            for device, nbytes in needs.items()
        ]
        ahead = asked.index(request)
        failures = list(self._failed.items())[:_SHOWN]
        texts = [
            *wants,
            *([f"{ahead} requests are before this one"] if ahead else []),
            *(f"object {object_id} could not be moved: {why}" for object_id, (_, why) in failures),
        ]
        return f"{'. '.join(texts)}. Suspend or release handles, free buffers, or ask for less"

    def _users(self, device: str) -> str:
        """Describe the holders of a device's memory, largest first."""
        held: list[tuple[int, str]] = []
        for stored in self._objects:
            nbytes = _bytes_on(stored, device)
            if nbytes:
                held.append((nbytes, f"{nbytes} bytes are {_named(stored)}, {self._state(stored)}"))
        held.sort(key=lambda entry: -entry[0])
        more = [f"{len(held) - _SHOWN} smaller ones"] if len(held) > _SHOWN else []
        reserved = self.used(device) - sum(nbytes for nbytes, _ in held)
        coming = [f"{reserved} bytes are reserved for pending allocations"] if reserved > 0 else []
        return "; ".join([*(text for _, text in held[:_SHOWN]), *more, *coming]) or "by no object"

    def _state(self, stored: StoredObject) -> str:
        active = self._leases.active(stored.object_id)
        pids = sorted({self._pid_of(session) for session in self._leases.users(stored.object_id)})
        if pids:
            return f"which pid {', '.join(map(str, pids[:_SHOWN]))} {'uses' if len(pids) == 1 else 'use'}"
        if stored.pinned:
            return "which is pinned"
        holders = sorted({self._pid_of(session) for session in self._leases.holders(stored.object_id) - active})
        if holders:
            return f"which pid {', '.join(map(str, holders[:_SHOWN]))} suspended"
        if self._is_moving(stored):
            return "which is being moved"
        return "which a task keeps until its result is fetched" if active else "which is not in use"


def _check_size(device: str, nbytes: int, what: str, limit: int) -> None:
    if nbytes > limit:
        raise CapabilityError(f"{nbytes} bytes on {device} are more than {what}, {limit}: ask for less")


def _bytes_on(stored: StoredObject, device: str) -> int:
    """Return the bytes of an object on a device."""
    return 0 if stored.cold else usage_of(infos_of([stored])).get(device, 0)


def _named(stored: StoredObject) -> str:
    """Return a readable name of an object."""
    return f"object {stored.object_id} of {stored.endpoint}()" if stored.kind == "result" else f"buffer {stored.object_id}"
