"""Generations and revisions of objects: their descriptions, and the messages about them."""

from __future__ import annotations

import msgspec

from shared_rpc.protocol.messages import Call, Message, Query
from shared_rpc.protocol.records import SegmentInfo


class Generation(msgspec.Struct, frozen=True, gc=False):
    """An object that became the current one of its cache key.

    ``object_id`` is its own, ``previous_id`` that of the previous current object, ``""`` if there was none.
    ``generation`` counts the builds of the key, from 1. ``nbytes`` are bytes, ``created_at`` is in Unix seconds.
    """

    endpoint: str
    cache_key: str
    object_id: str
    generation: int
    previous_id: str
    nbytes: int
    device: str
    server_id: str
    created_at: float


class Refresh(Call):
    """Call that builds the next generation of its object, or joins the run that does; the answer is :class:`Refreshed`."""


class Refreshed(Message):
    """The current generation."""

    generation: Generation


class AwaitRefreshes(Query[tuple[list[Generation], int, str]]):
    """Request for generations that became current after position ``after``, once there are any; -1 requests the current
    position at once.

    The answer has the latest new one of each key, in the order in which they became current; the position after them; and the
    id of the server, for which alone the position is valid.
    """

    after: int = -1

    @property
    def again(self) -> bool:  # type: ignore[override]
        """True if it names no position."""
        return self.after < 0


class GetLatest(Message):
    """Request for the current :class:`~shared_rpc.protocol.messages.Result` of an object's key, with a lease."""

    object_id: str


class GetObject(Message):
    """Request for the :class:`~shared_rpc.protocol.messages.Result` of an existing object, with a lease.

    ``cache_key`` is the object's key, or ``""``; the server uses it to detect that another generation has replaced the object.
    For a buffer the request is a :class:`~shared_rpc.protocol.messages.GetBuffer`, with its limits. Without an id, the object
    is that of the segment with this name.
    """

    object_id: str
    cache_key: str = ""
    segment: str = ""


class GetRevision(Message):
    """Request for the :class:`RevisionPage` of an object."""

    object_id: str


class RevisionPage(Message):
    """Location of an object's revision: a one-page segment, whose descriptor is in the frame.

    ``memory`` has one segment of the object for each device and mechanism that a writer has to synchronize with.
    """

    page: SegmentInfo
    memory: list[SegmentInfo]
