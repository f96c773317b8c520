"""What people ask who watch a server: who is connected, what is being built; and to drop one thing that they see.

The numbers of these messages are in :mod:`shared_rpc.protocol.catalogue`.
"""

from __future__ import annotations

from shared_rpc.protocol.messages import Message

__all__ = ["GetStatistics", "InvalidateObject", "ListRuns", "ListSessions"]


class ListSessions(Message):
    """Ask for :class:`FactsList`: every session, with its process."""


class ListRuns(Message):
    """Ask for :class:`FactsList`: runs of endpoints that have not ended, the oldest first, at most ``limit`` of them."""

    limit: int = 1000


class GetStatistics(Message):
    """Ask for :class:`Facts`: by endpoint, what it has done since the server began."""


class InvalidateObject(Message):
    """Drop one cached result by the object's id; :class:`Count` is 0 if the cache did not list it."""

    object_id: str
