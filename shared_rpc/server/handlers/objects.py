"""Objects and the leases on them."""

from __future__ import annotations

from shared_rpc.protocol import messages as m
from shared_rpc.protocol import monitoring as mo
from shared_rpc.protocol.infos import ListedObjectInfo
from shared_rpc.server.handlers.table import Caller, handles

#: Objects of one page: some hundred bytes each, and more for each of its holders.
_PAGE = 1000


@handles(m.Release)
def release(caller: Caller, message: m.Release) -> m.Count:
    return m.Count(caller.core.release(caller.session, message.object_ids))


@handles(m.Hold)
def hold(caller: Caller, message: m.Hold) -> m.Held:
    return caller.core.hold(caller.session, message)


@handles(m.GetObjectInfo)
def get_object_info(caller: Caller, message: m.GetObjectInfo) -> m.ObjectReply:
    return m.ObjectReply(caller.core.info_of(caller.core.stored(message.object_id)))


@handles(m.ListHolders)
def holders(caller: Caller, message: m.ListHolders) -> m.HoldersReply:
    return m.HoldersReply(caller.core.sessions.holders(caller.core.stored(message.object_id).object_id))


@handles(m.ListObjects)
def list_objects(caller: Caller, message: m.ListObjects) -> m.ObjectsReply:
    core = caller.core
    objects, after = core.objects.page(message.after, min(max(message.limit, 1), _PAGE))
    infos: list[ListedObjectInfo] = [
        {**core.info_of(stored), "cached": stored.listed, "holders": core.sessions.holders(stored.object_id)}
        for stored in objects
    ]
    return m.ObjectsReply(infos, after)


@handles(mo.InvalidateObject)
def invalidate_object(caller: Caller, message: mo.InvalidateObject) -> m.Count:
    return m.Count(caller.core.invalidate_object(message.object_id))
