"""Tiers of objects: messages that suspend and resume what a session holds, and move an object's bytes between tiers.

Their numbers are in :mod:`shared_rpc.protocol.catalogue`.
"""

from __future__ import annotations

from shared_rpc.protocol.infos import MoveInfo
from shared_rpc.protocol.messages import Ids, Message
from shared_rpc.protocol.records import SegmentInfo


class Suspend(Message):
    """The session does not touch the memory of these objects until it resumes them. It keeps its leases.

    The answer is :class:`~shared_rpc.protocol.messages.Count`: of those objects, how many the session had active.
    """

    object_ids: Ids


class Resume(Message):
    """Request for :class:`Resumed`, when the object is on its device.

    A client that gives it up while it waits for room gets the error that says who has the room.
    """

    object_id: str


class Resumed(Message):
    """An object that the session has active from now on.

    ``segments`` are those of its record, in their order, and their descriptors come with the frame. The name of each is the
    same as before, and the incarnation is another one if it was restored since. ``owner`` is as in
    :class:`~shared_rpc.protocol.messages.Result`.
    """

    generation: int
    segments: list[SegmentInfo]
    owner: str = ""


class Evict(Message):
    """Move objects to a lower tier; the answer is :class:`Moved`, when that is done.

    ``target`` is the id of an object, or the name of an endpoint for all of its objects. ``to`` is ``"host"``, ``"file"``, or
    ``""`` for the next lower tier that the server has.
    """

    target: str
    to: str = ""


class Restore(Message):
    """Move objects to their devices; the answer is :class:`Moved`. ``target`` is as in :class:`Evict`."""

    target: str


class Moved(Message):
    """The objects that changed their tier."""

    moves: list[MoveInfo]
