"""Objects as sessions hold them: leases, descriptions, tiers, and the pages of revisions."""

from __future__ import annotations

from shared_rpc.memory.backends.choice import chosen, lifetime
from shared_rpc.memory.revisions import new_page, read_only
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.infos import ListedObjectInfo, ObjectInfo
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.server.requests import Caller, handles
from shared_rpc.server.shared import State
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.tiers import Tiers

#: Objects per page: some hundred bytes each, and more for each holder.
_PAGE = 1000


class Holdings:
    """Requests about existing objects. On the server's loop only."""

    def __init__(self, state: State, tiers: Tiers) -> None:
        self._state = state
        self._tiers = tiers

    @handles(m.Release)
    def release(self, caller: Caller, message: m.Release) -> m.Answer:
        """Release leases."""
        return m.Answer.of(self._state.release(caller.session, message.object_ids))

    @handles(m.Hold)
    def hold(self, caller: Caller, request: m.Hold) -> m.Held:
        """Grant the session one more lease for the id of each existing managed object."""
        found = {object_id: self._state.objects.get(object_id) for object_id in request.object_ids}
        there = {object_id: stored for object_id, stored in found.items() if stored is not None and stored.managed}
        outdated = [each for each, stored in there.items() if stored.has_replaced(request.mapped.get(each, ()))]
        inactive = {*request.suspended, *outdated}
        held = [object_id for object_id in request.object_ids if object_id in there]
        for object_id in held:
            self._state.leases.grant(caller.session, object_id, active=object_id not in inactive)
        return m.Held(held, outdated)

    @handles(m.GetObjectInfo)
    def get_info(self, caller: Caller, message: m.GetObjectInfo) -> m.Answer:
        """Describe one object."""
        return m.Answer.of(self.info_of(self._state.stored(message.object_id)))

    @handles(m.ListHolders)
    def list_holders(self, caller: Caller, message: m.ListHolders) -> m.Answer:
        """Describe the holders of an object."""
        return m.Answer.of(self._state.sessions.holders(self._state.stored(message.object_id).object_id))

    @handles(m.ListObjects)
    def list_objects(self, caller: Caller, message: m.ListObjects) -> m.Answer:
        """Describe a page of objects."""
        objects, after = self._state.objects.page(message.after, _PAGE)
        infos: list[ListedObjectInfo] = [
            {
                **self.info_of(stored),
                "cached": stored.listed,
                "holders": self._state.sessions.holders(stored.object_id),
            }
            for stored in objects
        ]
        return m.Answer.of((infos, after))

    def info_of(self, stored: StoredObject) -> ObjectInfo:
        """Describe an object."""
        state, record = self._state, stored.record
        copies, moving = self._tiers.info(stored)
        info: ObjectInfo = {
            "object_id": stored.object_id,
            "server_id": state.server_id,
            "endpoint": stored.endpoint,
            "kind": stored.kind,
            "cache_key": stored.cache_key,
            "nbytes": record.nbytes,
            "private_nbytes": record.private_nbytes,
            "device": record.device,
            "generation": stored.generation,
            "current": stored.current,
            "leases": len(state.leases.holders(stored.object_id)),
            "created_at": stored.created_at,
            "last_accessed_at": state.clock.unix(stored.last_accessed_at),
            "stale": stored.stale,
            "tier": stored.tier,
            "active": len(state.leases.users(stored.object_id)),
            "pinned": stored.pinned,
            "copies": copies,
        }
        if moving is not None:
            info["moving"] = moving
        if stored.candidate and not stored.invalidated:
            info["candidate"] = True
        bound = lifetime(stored.record.segments)
        if bound:
            info["lifetime"] = bound
        if stored.kind == "buffer":
            info["state"], info["expires_at"] = state.buffers.info(stored.object_id)
        return info

    @handles(g.GetRevision)
    def get_revision(self, caller: Caller, message: g.GetRevision) -> None:
        """Send the page of an object's revision, and one segment for each kind of memory of the object.

        The page is created on first request.

        :raises StaleHandleError: if the server does not own the object.
        :raises ServerBusy: if no descriptor is left for its page.
        """
        stored = self._state.stored(message.object_id)
        sealed = any(segment.info.access == "read" for segment in stored.record.segments)
        page = stored.page
        if page is None:
            self._state.capacity.require_descriptors(1)
            page = stored.page = new_page("read" if sealed else "read_write")
            self._state.objects.notify(stored)
        # This process may write to memory that it shares read-only.
        with read_only(page) if sealed and not caller.local else page.duplicate() as handed:
            caller.reply(g.RevisionPage(handed.info, _memory_of(stored)), owners=(handed.owner,))


def _memory_of(stored: StoredObject) -> list[SegmentInfo]:
    kinds = {(segment.info.device, segment.info.mechanism): segment.info for segment in stored.record.segments}
    if not kinds and stored.record.device != "cpu":  # in the local role objects have no segments
        return [SegmentInfo("", 0, stored.record.device, mechanism=chosen(stored.record.device).name)]
    return list(kinds.values())
