"""Tiers of a server's objects: the sessions that have them active, and the moves of their bytes between tiers.

An object is evicted when no session has it active: a copy of it is made in a lower tier unless there is one, and the memory on
its device is freed. It is restored, once for all requests, when one needs it: a method that sends an object does so inside
:meth:`Tiers.warm` if the object is cold. While the copy for an eviction is being made the object is still warm; if a request
uses it then, it is not evicted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from typing import Literal

import anyio

from shared_rpc.errors import (
    CapabilityError,
    RecordError,
    ServerBusy,
    SharedRPCError,
    StaleHandleError,
)
from shared_rpc.execution.device_memory import until_freed
from shared_rpc.execution.outcomes import Failure
from shared_rpc.memory.copies import LowerCopy
from shared_rpc.memory.revisions import settled_revision
from shared_rpc.memory.segments import Segment
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.observability.events import MoveReason
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol.infos import MoveInfo, MovingInfo
from shared_rpc.protocol.records import EXPORTER_OWNED, SegmentInfo, Tier
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.capacity import HOST, Move, Reservation
from shared_rpc.server.requests import Answer, Caller, handles
from shared_rpc.server.shared import State
from shared_rpc.server.state.objects import OBJECT_ID, StoredObject, infos_of
from shared_rpc.server.state.tiers import LOWER, STALE, is_good, next_tier, outlives_use

_log = logging.getLogger("shared_rpc.server")

#: Maximum number of successive copies of an object that is written to.
_ATTEMPTS = 3


class Tiers:
    """The tiers of all objects of a server, and the requests that move objects. On its loop only.

    :param spill: the directory for files, None for no files.
    """

    def __init__(self, state: State, spill: SpillDirectory | None) -> None:
        self._state = state
        self._objects = state.objects
        self._leases = state.leases
        self._capacity = state.capacity
        self._memory = state.memory
        self._spill = spill
        #: Held while a copy for a later move is made.
        self._copying_ahead = asyncio.Lock()
        self._moves, self._kept = state.capacity.moves, state.capacity.kept
        state.capacity.below, state.capacity.begin_eviction = self.below, self.begin_eviction
        state.leases.on_active = self._used

    def info(self, stored: StoredObject) -> tuple[dict[Tier, int], MovingInfo | None]:
        """Return the bytes of an object's good copies by tier, and its active move."""
        group = self._objects.group(stored)
        copies: dict[Tier, int] = {
            tier: sum(info.nbytes for info in infos_of([stored]).values())
            for tier in LOWER
            if stored.record.segments and len(self._objects.copies) and self._has_copies(group, tier)
        }
        move = self._moves.get(stored.object_id)
        return copies, {"to": move.to, "done": move.done, "total": move.total} if move is not None else None

    # Sessions.

    @handles(t.Suspend)
    def suspend(self, caller: Caller, message: t.Suspend) -> m.Answer:
        """Make the session's leases on these objects inactive; return how many were active."""
        suspended = [object_id for object_id in message.object_ids if self._leases.suspend(caller.session, object_id)]
        self._state.settle(*suspended)
        return m.Answer.of(len(suspended))

    @handles(t.Resume)
    def resume(self, caller: Caller, message: t.Resume) -> Answer:
        """Make the session's lease on an object active, and send its memory once it is on its device.

        :raises StaleHandleError: if the session has no lease on it.
        """
        session, object_id = caller.session, message.object_id

        def held() -> StoredObject:
            stored = self._objects.get(object_id)
            if stored is None or session not in self._leases.holders(object_id):
                raise StaleHandleError(
                    f"object {object_id[:100]} cannot be resumed: "
                    + ("the server has no such object" if stored is None else "the session has no lease on it any more"),
                    reason="object_gone" if stored is None else "released",
                )
            return stored

        def hand_out(stored: StoredObject) -> None:
            self._leases.resume(session, object_id)
            segments = stored.record.segments
            reply = t.Resumed([segment.info for segment in segments], self._state.server_id)
            caller.reply(reply, owners=tuple(segment.owner for segment in segments))

        return self.serve(caller, held, hand_out, reason="resume")

    # Requests for cold objects.

    def serve(
        self,
        caller: Caller,
        find: Callable[[], StoredObject],
        use: Callable[[StoredObject], object],
        *,
        reason: MoveReason = "use",
    ) -> Answer:
        """Use an object for a request: now if it is on its device, otherwise once it is restored.

        :param find: returns the object. Called again after the restore, when the object may be another one.
        :param use: answers the caller.
        """
        stored = find()
        if self.must_wait(caller.session, stored):
            return self._serve_warm(caller, find, use, reason)
        use(stored)
        return None

    async def _serve_warm(
        self, caller: Caller, find: Callable[[], StoredObject], use: Callable[[StoredObject], object], reason: MoveReason
    ) -> None:
        stored = find()
        while True:
            async with self.warm(caller.waiter, stored, reason=reason):
                stored = find()
                if not stored.cold:
                    use(stored)
                    return

    def must_wait(self, session: str, stored: StoredObject) -> bool:
        """Return True if a session must request an object by :meth:`warm` before using it.

        This is also the case while others wait for capacity on its device, so that objects in use become idle.
        """
        return stored.cold or self._capacity.must_wait(session, stored)

    @contextlib.asynccontextmanager
    async def warm(
        self, owner: Hashable, stored: StoredObject, *, first: bool = False, reason: MoveReason = "use"
    ) -> AsyncIterator[list[MoveInfo]]:
        """Restore an object once for all requests, and keep it on its device while the block runs.

        The block gets the moves made for this request. An object dropped during the wait is not restored.

        :param owner: identifies the request, see :meth:`Capacity.why`.
        :param first: go before others that wait for capacity.
        :raises ServerBusy: if there is no capacity on a device now, and requests do not wait.
        :raises CapabilityError: if there can never be that much.
        :raises WorkerCrashed: if no worker is available to allocate the memory.
        :raises StaleHandleError: if the bytes are lost; the objects were dropped then.
        """
        made: list[MoveInfo] = []
        kept = False
        try:
            while self._keeps(stored) and (stored.cold or (self._capacity.evicts and not kept)):
                move = self._capacity.move_of(stored)
                if move is not None and move.direction == "down":
                    move.cancel()
                reservation = await self._capacity.request(owner, {}, stored, first=first).wait()
                if not kept:
                    kept = True
                    self._kept[stored.object_id] += 1
                missing = stored.cold and self._keeps(stored)
                move = self._capacity.move_of(stored) if missing else None
                if missing and move is None:
                    move = self._enter(self._objects.group(stored), "device", "up", reason)
                    self._state.waits.begin(move, self._restored(move, stored, reservation, made))
                else:
                    reservation.release()
                if move is not None:
                    await move.over.wait()
                    if move.error is not None:
                        raise move.error
            yield made
        finally:
            if kept:
                self._kept[stored.object_id] -= 1
            if not self._kept[stored.object_id]:
                del self._kept[stored.object_id]
            self._state.settle()

    async def _restored(self, move: Move, stored: StoredObject, reservation: Reservation, made: list[MoveInfo]) -> None:
        """Move a group to its device, for all requests that wait for it."""
        with self._moving(move), reservation:
            try:
                made += await self._restore(move, stored)
            except Exception as error:
                move.error = error

    # Requested moves.

    @handles(t.Evict)
    async def evict(self, caller: Caller, message: t.Evict) -> m.Answer:
        """Move an object, or all of an endpoint, to a lower tier; list those that have changed their tier."""
        return await self._move(message.target, lambda stored: self.move_down(stored, message.to))

    @handles(t.Restore)
    async def restore(self, caller: Caller, message: t.Restore) -> m.Answer:
        """Return an object, or all of an endpoint, to its device; see :meth:`evict`."""

        async def move_up(stored: StoredObject) -> list[MoveInfo]:
            async with self.warm(caller.waiter, stored, reason="request") as moves:
                return moves

        return await self._move(message.target, move_up)

    async def _move(self, target: str, move: Callable[[StoredObject], Awaitable[list[MoveInfo]]]) -> m.Answer:
        """Move the objects of a target: an object's id or an endpoint's name.

        :raises StaleHandleError, EndpointNotFound: if there is none.
        """
        if OBJECT_ID.fullmatch(target):
            found = [self._state.stored(target)]
        else:
            name = self._state.registry.get(target).name
            found = [stored for stored in self._objects if stored.endpoint == name]
        moved: list[MoveInfo] = []
        refusals: list[SharedRPCError] = []
        for stored in found:
            try:
                moved += await move(stored)
            except SharedRPCError as error:
                refusals.append(error)
        if refusals:
            raise _together(refusals, len(moved))
        return m.Answer.of(moved)

    async def move_down(self, stored: StoredObject, to: str = "") -> list[MoveInfo]:
        """Evict an object and those that share its memory; return those that have changed their tier.

        :param to: ``"host"``, ``"file"``, or ``""`` for the next tier that the server has.
        :raises ServerBusy: if a session has one of them active, if one is pinned, or if they are written to constantly.
        :raises CapabilityError: if there is no lower tier for them, or no capacity there.
        """
        await self._free(stored)
        group = self._objects.group(stored)
        tier = self._evictable(group, to) if self._keeps(stored) else None
        if tier is None:
            return []
        moves = await self._lower(self._enter(group, tier, "down", "request"), to)
        if moves is None:  # the objects that share its memory have changed
            return await self.move_down(stored, to)
        await until_freed()
        return moves

    async def _lower(self, move: Move, to: str) -> list[MoveInfo] | None:
        """Move a group to a lower tier; return None if the group changed in the meantime."""
        copied = 0
        group, tier, stored = move.group, move.to, move.group[0]
        with self._moving(move):
            new = sum(info.nbytes for info in self._uncopied(group)) if tier == "host" else 0
            with await self._capacity.request(None, {HOST: new} if new else {}, patient=False).wait() as move.host:
                for _ in range(_ATTEMPTS):
                    if copied == 0 and (stored.cold or _is_reusable(group)) and self._has_copies(group, tier):
                        break
                    copied += await self._copy(move)
                    if not self._keeps(stored):
                        return []
                    if self._has_copies(group, tier) or not all(map(self._keeps, group)):
                        break
                else:
                    raise ServerBusy(
                        f"{_named(stored)} is not evicted: it was written to during each of {_ATTEMPTS} copies of it"
                    )
            if move.cancelled:
                raise ServerBusy(f"{_named(stored)} is not evicted: it was requested during the move")
            if set(self._objects.group(stored)) != set(group):
                return None
            self._evictable(group, to)
            before = stored.tier
            self._objects.evict(group, tier)
        self._state.executor.reclaim()
        return self._describe_moves(move, group, before, copied)

    # Evictions for capacity.

    def may_share_slab(self, spec: EndpointSpec) -> bool:
        """Return True if small results of an endpoint may share a segment, because they are not counted or moved separately."""
        return self._capacity.unlimited and self._spill is None and spec.host_copy == "on_evict" and not spec.pinned

    def below(self, group: Sequence[StoredObject]) -> tuple[Tier, ...]:
        """Return the lower tiers that a group can move to, nearest first."""
        found: list[Tier] = []
        for to in LOWER:
            with contextlib.suppress(CapabilityError):
                if self._lower_tier(group, to) is not None:
                    found.append(to)
        return tuple(found)

    def begin_eviction(self, group: Sequence[StoredObject], to: Tier) -> None:
        """Begin to move a group down."""
        move = self._enter(group, to, "down", "capacity")
        self._state.waits.begin(move, self._evict(move, to))

    async def _evict(self, move: Move, to: Tier) -> None:
        try:
            if await self._lower(move, to) is None:
                raise ServerBusy(f"the objects that share the memory of {_named(move.group[0])} have changed")
        except Exception as error:
            problem = Failure.unexpected(error, "a move between tiers failed").error  # that of a driver is logged
            assert isinstance(problem, SharedRPCError), "a failure of this process has its exception"
            _log.info("%s was not evicted: %s", _named(move.group[0]), problem)
            self._capacity.failed(move.group, problem)

    def copy_ahead(self, stored: StoredObject) -> None:
        """Copy an object in the background for a later eviction, if it has a lower tier."""
        if stored.record.segments and not self._state.waits.stopped:
            self._state.waits.begin(object(), self._copy_ahead(stored))

    async def _copy_ahead(self, stored: StoredObject) -> None:
        try:
            async with self._copying_ahead:
                await self._free(stored)
                group = self._objects.group(stored)
                tier = self._lower_tier(group, "") if self._keeps(stored) and not stored.cold else None
                if tier is not None and not self._has_copies(group, tier):
                    new = self._uncopied(group) if tier == "host" else list(infos_of(group).values())
                    self._capacity.require_descriptors(len(new))
                    host = sum(info.nbytes for info in new) if tier == "host" else 0
                    if not self._capacity.has_host(host):
                        raise ServerBusy(f"its {host} bytes exceed the limit of host copies")
                    move = self._enter(group, tier, "", "capacity")
                    with self._moving(move), self._capacity.take({HOST: host}) as move.host:
                        await self._copy(move)
        except SharedRPCError as error:
            _log.info("%s is not copied ahead of its eviction: %s", _named(stored), error)

    # One move.

    def _used(self, object_id: str) -> None:
        """Abandon the eviction of an object that a session uses."""
        move = self._moves.get(object_id)
        if move is not None and move.direction == "down":
            move.cancel()

    def _keeps(self, stored: StoredObject) -> bool:
        return self._objects.get(stored.object_id) is stored

    async def _free(self, stored: StoredObject) -> None:
        """Wait until neither an object nor those that share its memory are being moved."""
        while (move := self._capacity.move_of(stored)) is not None:
            await move.over.wait()

    def _enter(self, group: Sequence[StoredObject], to: Tier, direction: Literal["up", "down", ""], reason: MoveReason) -> Move:
        """Register a move of a group that has none; :meth:`_moving` ends it."""
        move = Move(group, to, direction, reason)
        for info in infos_of(group).values() if direction == "down" else ():
            if not group[0].cold:
                move.frees[info.device] += info.nbytes
            copy = self._objects.copies.get(info.id, "host")
            if to == "file" and copy is not None:
                move.frees[HOST] += copy.segment.info.nbytes
        self._moves.update((member.object_id, move) for member in group)
        return move

    @contextlib.contextmanager
    def _moving(self, move: Move) -> Iterator[None]:
        """End a move on leaving the block."""
        try:
            yield
        finally:
            for member in move.group:
                del self._moves[member.object_id]
            move.over.set()
            self._capacity.changed()

    def _lower_tier(self, group: Sequence[StoredObject], to: str) -> Tier | None:
        """Return the target tier of a group's move, None if there is nothing to move.

        :raises CapabilityError: if there is no such tier for it.
        """
        infos = infos_of(group)
        for stored in group:
            if not stored.record.skeleton and not stored.record.segments:
                raise CapabilityError(
                    f"{_named(stored)} cannot be evicted: in the local role (pid {os.getpid()}) results lie in no shared memory"
                )
            if stored.host_copy == "never":
                raise CapabilityError(f"{_named(stored)} cannot be evicted: its endpoint was shared with host_copy='never'")
        if any(info.slab for info in infos.values()):
            raise CapabilityError(
                f"{_named(group[0])} cannot be evicted: it shares a segment with other small results. Share its endpoint with "
                f"host_copy='at_build', or give the server a quota or a spill directory: then each has a segment of its own"
            )
        bound = {info.mechanism for info in infos.values()} & EXPORTER_OWNED
        if bound:
            raise CapabilityError(
                f"{_named(group[0])} cannot be evicted: memory that is shared by {', '.join(sorted(bound))!r} belongs to the "
                f"process that made it; see the mechanism 'vmm'"
            )
        devices = {info.device for info in infos.values()}
        try:
            return next_tier(group[0].tier, devices, to, files=self._spill is not None) if infos else None
        except CapabilityError as error:
            raise CapabilityError(f"{_named(group[0])} cannot be evicted: {error}") from None

    def _evictable(self, group: Sequence[StoredObject], to: str) -> Tier | None:
        """Return the target tier of a group's eviction, None if the group is there already, or lower.

        :raises ServerBusy: if it may not be evicted now.
        :raises CapabilityError: if it can never be evicted.
        """
        tier = self._lower_tier(group, to)
        for stored in group if tier is not None else ():
            where = "" if stored is group[0] else f", whose memory {_named(group[0])} shares,"
            if stored.pinned:
                raise ServerBusy(f"{_named(stored)}{where} cannot be evicted: its endpoint was shared with pinned=True")
            pids = sorted({self._state.sessions.pid_of(session) for session in self._leases.users(stored.object_id)})
            if pids:
                raise ServerBusy(
                    f"{_named(stored)}{where} cannot be evicted while it is in use by pid {', '.join(map(str, pids))}: suspend "
                    f"or release the handles there"
                )
        return tier

    def _revision(self, group: Iterable[StoredObject]) -> int | None:
        """Return the sum of a group's revisions, None while one of them is being written."""
        total = 0
        for stored in group:
            number = settled_revision(stored.page) if stored.page is not None and self._keeps(stored) else 0
            if number is None:
                return None
            total += number
        return total

    def _has_copies(self, group: Sequence[StoredObject], tier: Tier) -> bool:
        """Return True if a group has up-to-date copies in a tier."""
        copies = [self._objects.copies.get(segment_id, tier) for segment_id in infos_of(group)]
        if group[0].cold:
            return None not in copies
        revision = self._revision(group)
        return all(is_good(copy, revision) for copy in copies)

    def _uncopied(self, group: Sequence[StoredObject]) -> list[SegmentInfo]:
        """Return the segments of a group without host memory of a copy, good or not."""
        return [info for info in infos_of(group).values() if self._objects.copies.get(info.id, "host") is None]

    async def _copy(self, move: Move) -> int:
        """Copy a move's group; return the number of bytes copied. Good copies are kept.

        Host memory of an earlier copy is reused: allocating new memory takes the driver longer than the copy.

        :raises ServerBusy: if the move was cancelled.
        """
        group, infos = move.group, infos_of(move.group)
        if move.to == "host":
            await self._spare_host(group)
        if not all(map(self._keeps, group)):
            return 0
        cold = group[0].cold
        revision = self._revision(group)
        if revision is None and not cold:
            raise ServerBusy(f"{_named(group[0])} is not copied while it is being updated")
        sources = []
        for segment_id in infos:
            source = self._objects.segment(segment_id) or self._objects.copies.highest(segment_id).segment
            sources.append(source.duplicate())
        into: dict[str, Segment] = {}
        for segment_id in infos if move.to == "host" else ():
            earlier = self._objects.copies.get(segment_id, "host")
            if earlier is not None:
                earlier.revision = STALE  # it is written to from here on
                into[segment_id] = earlier.segment.duplicate()
        made: Sequence[LowerCopy] | None = None
        try:
            with anyio.CancelScope() as move.copying:
                if move.cancelled:
                    move.copying.cancel()
                made = await self._memory.lower(sources, move.to, self._spill, move.note, into)
        finally:
            if made is None:
                for segment_id in into:  # the copying may continue to its next step
                    self._objects.copies.discard(segment_id, "host")
            _close([*sources, *into.values()])
        if made is None:
            raise ServerBusy(f"{_named(group[0])} is not evicted: it was requested during the move")
        kept = all(map(self._keeps, group))
        good = cold or self._revision(group) == revision
        for info, copy in zip(infos.values(), made, strict=True):
            copy.revision = (revision or 0) if good else STALE
            if kept and (good or copy.tier == "host"):
                self._objects.copies.add(info, copy)
            else:
                copy.close()
        if move.host is not None:
            move.host.release()  # the copies count themselves
        return move.done

    async def _spare_host(self, group: Sequence[StoredObject]) -> None:
        """Free the host memory of other objects' stale copies if there is too little for a group's copies."""
        new, free = sum(info.nbytes for info in self._uncopied(group)), self._memory.host_free
        if free is not None and new > free and self._capacity.drop_stale_copies(new - free):
            await until_freed()

    async def _restore(self, move: Move, stored: StoredObject) -> list[MoveInfo]:
        """Restore a cold group, whose memory is reserved."""
        before = stored.tier
        group = [member for member in move.group if self._keeps(member)]
        infos = infos_of(group)
        # The object may be dropped during the move, together with its copies.
        kept = [self._objects.copies.highest(segment_id) for segment_id in infos]
        copies = [LowerCopy(copy.segment.duplicate(), copy.tier, copy.digest) for copy in kept]
        borrowed = [copy.segment for copy in copies]
        try:
            self._capacity.require_descriptors(len(infos))
            segments = await self._memory.raise_(copies, list(infos.values()), move.note)
            left = [member for member in group if self._keeps(member)]
            used = infos_of(left)
            _close(segment for segment in segments if segment.info.id not in used)
            self._objects.warm(left, [segment for segment in segments if segment.info.id in used])
        except RecordError as error:
            raise self._lost(group, error) from error
        finally:
            _close(borrowed)
        revision = self._revision(left) if _is_reusable(left) else STALE
        # Host memory is kept for the next copy, if there is enough.
        keeps = revision == STALE and not self._memory.host_is_short
        for segment_id, info in used.items():
            for copy in self._objects.copies.of(segment_id):
                copy.revision = revision if revision is not None else STALE
            if revision == STALE:
                own = info.device == "cpu"  # the object's own memory is its copy on the host
                self._objects.copies.discard(segment_id, "file" if keeps and not own else None)
        return self._describe_moves(move, left, before, move.done)

    def _lost(self, group: Sequence[StoredObject], error: RecordError) -> StaleHandleError:
        """Drop objects whose bytes are lost, with all leases on them."""
        for stored in group:
            _log.error("%s is dropped, because it cannot be restored: %s", _named(stored), error)
            self._state.drop(stored)
        return StaleHandleError(f"{_named(group[0])} was dropped: it cannot be restored: {error}", reason="object_gone")

    def _describe_moves(self, move: Move, group: Sequence[StoredObject], before: Tier, copied: int) -> list[MoveInfo]:
        """Describe a completed move of the objects that are left."""
        moves: list[MoveInfo] = []
        for stored in group:
            info: MoveInfo = {
                "object_id": stored.object_id,
                "endpoint": stored.endpoint,
                "cache_key": stored.cache_key,
                "tier": stored.tier,
                "nbytes": sum(info.nbytes for info in infos_of([stored]).values()),
                "copied": copied if stored is group[0] else 0,
                "seconds": time.monotonic() - move.began,
            }
            _log.info("%s is in tier %r, %d bytes were copied", _named(stored), stored.tier, info["copied"])
            self._state.events.moved(stored, before, info, move.reason)
            moves.append(info)
        return moves


def _is_reusable(group: Iterable[StoredObject]) -> bool:
    """Return True if copies of a group remain usable after the object was in use."""
    return all(outlives_use(infos_of([member]).values(), member.host_copy) for member in group)


def _close(segments: Iterable[Segment]) -> None:
    for segment in segments:
        segment.close()


def _named(stored: StoredObject) -> str:
    return f"object {stored.object_id} ({stored.cache_key or stored.endpoint or 'a buffer'})"


def _together(refusals: Sequence[SharedRPCError], moved: int) -> SharedRPCError:
    """Combine the errors of several objects into one."""
    if len(refusals) == 1 and not moved:
        return refusals[0]
    text = "; ".join(str(error) for error in refusals)
    return type(refusals[0]).restore(f"{moved} objects were moved, and {len(refusals)} were not: {text}", refusals[0].detail())
