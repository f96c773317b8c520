"""The pages of objects' revisions, made when somebody first asks for one."""

from __future__ import annotations

from shared_rpc.errors import StaleHandleError
from shared_rpc.memory.backends.choice import chosen
from shared_rpc.memory.revisions import new_page, read_only
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import SegmentInfo
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.state.quotas import Quotas

__all__ = ["page_of"]


def page_of(objects: ObjectStore, quotas: Quotas, object_id: str, *, local: bool) -> tuple[Segment, list[SegmentInfo]]:
    """A descriptor of an object's page, which the caller owns, and a segment for each kind of memory that the object is in.

    :param local: whether it is for this process, which may write to what it shares for reading only.
    :raises StaleHandleError: if the server does not own the object.
    :raises ServerBusy: if there is no descriptor for its page.
    """
    stored = objects.get(object_id)
    if stored is not None and stored.page is None:
        quotas.require_descriptors(1)
        stored = objects.get(object_id)  # that may have been what made room
    if stored is None:
        raise StaleHandleError(f"the server owns no object {object_id[:100]}", reason="object_gone")
    page = stored.page
    if page is None:
        page = new_page()
        objects.add_page(stored, page)
    sealed = any(segment.info.access == "read" for segment in stored.record.segments)
    return read_only(page) if sealed and not local else page.duplicate(), _memory_of(stored)


def _memory_of(stored: StoredObject) -> list[SegmentInfo]:
    kinds = {(segment.info.device, segment.info.mechanism): segment.info for segment in stored.record.segments}
    if not kinds and stored.record.device != "cpu":  # in the local role nothing lies in segments
        return [SegmentInfo("", 0, stored.record.device, mechanism=chosen(stored.record.device).name)]
    return list(kinds.values())
