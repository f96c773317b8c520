"""Messages for watching a server: sessions, runs, statistics; and for dropping one cached object.

The numbers of these messages are in :mod:`shared_rpc.protocol.catalogue`.
"""

from __future__ import annotations

from shared_rpc.protocol.infos import EndpointStatistics, RunInfo, SessionInfo
from shared_rpc.protocol.messages import Message


class ListSessions(Message):
    """Request for :class:`SessionsReply`."""


class SessionsReply(Message):
    """All sessions, with their processes."""

    infos: list[SessionInfo]


class ListRuns(Message):
    """Request for :class:`RunsReply` of at most ``limit`` runs."""

    limit: int = 1000


class RunsReply(Message):
    """Runs of endpoints that have not ended, the oldest first."""

    infos: list[RunInfo]


class GetStatistics(Message):
    """Request for :class:`StatisticsReply`."""


class StatisticsReply(Message):
    """The counts of each endpoint since the server began, by name."""

    infos: dict[str, EndpointStatistics]


class InvalidateObject(Message):
    """Drop one cached result by the object's id; :class:`Count` is 0 if the cache did not list it."""

    object_id: str
