"""Messages for watching a server: sessions, runs, statistics; and for dropping one cached object.

The numbers of these messages are in :mod:`shared_rpc.protocol.catalogue`.
"""

from __future__ import annotations

from shared_rpc.protocol.infos import EndpointStatistics, RunInfo, SessionInfo
from shared_rpc.protocol.messages import Message, Query


class ListSessions(Query[list[SessionInfo]]):
    """Request for all sessions, with their processes."""


class ListRuns(Query[list[RunInfo]]):
    """Request for at most ``limit`` runs of endpoints that have not ended, the oldest first."""

    limit: int = 1000


class GetStatistics(Query[dict[str, EndpointStatistics]]):
    """Request for the counts of each endpoint since the server began, by name."""


class InvalidateObject(Message):
    """Drop one cached result by the object's id; :class:`Count` is 0 if the cache did not list it."""

    object_id: str
