"""The pages of objects' revisions, made when somebody first asks for one."""

from __future__ import annotations

from shared_rpc.errors import StaleHandleError
from shared_rpc.memory.mechanisms import chosen
from shared_rpc.memory.revisions import new_page, read_only
from shared_rpc.memory.segments import Segment, SegmentInfo
from shared_rpc.store.objects import ObjectStore, StoredObject

__all__ = ["Revisions"]


class Revisions:
    """All pages of a server. On its loop only."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._pages: dict[str, Segment] = {}

    def page(self, object_id: str, *, local: bool) -> tuple[Segment, list[SegmentInfo]]:
        """A descriptor of an object's page, which the caller owns, and a segment for each kind of memory that the object is in.

        :param local: whether it is for this process, which may write to what it shares for reading only.
        :raises StaleHandleError: if the server does not own the object.
        """
        stored = self._objects.get(object_id)
        if stored is None:
            raise StaleHandleError(f"the server owns no object {object_id[:100]}", reason="object_gone")
        page = self._pages.get(object_id)
        if page is None:
            page = self._pages[object_id] = new_page()
        sealed = any(segment.info.access == "read" for segment in stored.record.segments)
        return read_only(page) if sealed and not local else page.duplicate(), _memory_of(stored)

    def forget(self, object_id: str) -> None:
        """The object is gone; those who have its page keep it."""
        page = self._pages.pop(object_id, None)
        if page is not None:
            page.close()

    def close(self) -> None:
        """Close all, as in a forked child, whose copies they are."""
        for object_id in tuple(self._pages):
            self.forget(object_id)


def _memory_of(stored: StoredObject) -> list[SegmentInfo]:
    kinds = {(segment.info.device, segment.info.mechanism): segment.info for segment in stored.record.segments}
    if not kinds and stored.record.device != "cpu":  # in the local role nothing lies in segments
        return [SegmentInfo("", 0, stored.record.device, mechanism=chosen(stored.record.device).name)]
    return list(kinds.values())
