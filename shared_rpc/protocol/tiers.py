"""Tiers of objects: messages that suspend and resume a session's objects, and move an object's bytes between tiers."""

from __future__ import annotations

from shared_rpc.protocol.infos import MoveInfo
from shared_rpc.protocol.messages import Ids, Message, Query
from shared_rpc.protocol.records import SegmentInfo


class Suspend(Query[int]):
    """Notice that the session does not access the memory of these objects until it resumes them. It keeps its leases.

    The answer is the number of these objects that the session had active.
    """

    again = False
    object_ids: Ids


class Resume(Message):
    """Request for :class:`Resumed` once the object is on its device.

    A client that cancels while the request waits for memory gets the error that names the holders of the memory.
    """

    object_id: str


class Resumed(Message):
    """An object that is active in the session from now on.

    ``segments`` are those of its record, in order; their descriptors are in the frame. Their names are unchanged, their
    incarnations are new if they were restored. ``owner`` is as in :class:`~shared_rpc.protocol.messages.Result`.
    """

    segments: list[SegmentInfo]
    owner: str = ""


class Evict(Query[list[MoveInfo]]):
    """Request to move objects to a lower tier; the answer follows the move.

    ``target`` is the id of an object, or an endpoint for all of its objects. ``to`` is ``"host"``, ``"file"``, or ``""`` for
    the next lower tier of the server.
    """

    again = False
    target: str
    to: str = ""


class Restore(Query[list[MoveInfo]]):
    """Request to move objects to their devices; the answer follows the move. ``target`` is as in :class:`Evict`."""

    again = False
    target: str
