"""Generations and revisions of objects: their descriptions, and the messages about them.

Their numbers are in :mod:`shared_rpc.protocol.catalogue`.
"""

from __future__ import annotations

import msgspec

from shared_rpc.protocol.infos import ObjectInfo
from shared_rpc.protocol.messages import Call, Message
from shared_rpc.protocol.records import SegmentInfo


class Generation(msgspec.Struct, frozen=True, gc=False):
    """An object that became the current one of its cache key.

    ``object_id`` is its own, ``previous_id`` that of the object which was current just before, ``""`` if none was.
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
    """A call that builds the next generation of its object, or joins the run that does. The answer is :class:`Refreshed`."""


class Refreshed(Message):
    """The generation that is current now."""

    generation: Generation


class AwaitRefreshes(Message):
    """Request for :class:`Refreshes` since position ``after``, when there are any; with -1 for the position now, at once."""

    after: int = -1


class Refreshes(Message):
    """New generations, the latest of each key alone, in the order they became current; and the position after them.

    A position means something to the server with that id alone.
    """

    generations: list[Generation]
    after: int
    server_id: str


class GetLatest(Message):
    """Request for the :class:`~shared_rpc.protocol.messages.Result` of an object's key that is current now, with a lease."""

    object_id: str


class GetObject(Message):
    """Request for the :class:`~shared_rpc.protocol.messages.Result` of an object that is there, with a lease.

    ``cache_key`` is its key, ``""`` if it has none: it tells whether another generation has taken its place. Of a buffer it is
    :class:`~shared_rpc.protocol.messages.GetBuffer`, whose terms count.
    """

    object_id: str
    cache_key: str = ""


class Retire(Message):
    """Free superseded objects without holders, of an endpoint or of one id; the answer is :class:`RetireReply`."""

    target: str


class RetireReply(Message):
    """The superseded objects that are left."""

    infos: list[ObjectInfo]


class GetRevision(Message):
    """Request for the :class:`RevisionPage` of an object."""

    object_id: str


class RevisionPage(Message):
    """Place of an object's revision: a segment of one page, whose descriptor comes with the frame.

    ``memory`` has a segment of the object's for each device and mechanism: what a writer has to wait for.
    """

    page: SegmentInfo
    memory: list[SegmentInfo]
