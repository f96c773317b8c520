"""What a client may ask who watches the server, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared_rpc.protocol import messages as m
from shared_rpc.protocol import monitoring as mo
from shared_rpc.protocol.frames import Frame
from shared_rpc.server.core import Core
from shared_rpc.server.sessions import Sessions

__all__ = ["MONITORING_HANDLERS", "MonitoringRequests"]

#: Runs that are told at once.
_MOST_RUNS = 1000


class MonitoringRequests:
    """These requests of one connection; the rest of it is :class:`shared_rpc.server.requests.Requests`."""

    _core: Core
    _sessions: Sessions
    _reply: Callable[..., bool]

    def _list_sessions(self, frame: Frame, message: mo.ListSessions) -> None:
        self._reply(frame.request_id, m.FactsList(self._sessions.facts()))

    def _list_runs(self, frame: Frame, message: mo.ListRuns) -> None:
        limit = min(max(message.limit, 1), _MOST_RUNS)
        self._reply(frame.request_id, m.FactsList(self._core.runs.facts(limit)))

    def _get_statistics(self, frame: Frame, message: mo.GetStatistics) -> None:
        self._reply(frame.request_id, m.Facts(self._core.runs.statistics.facts()))

    def _invalidate_object(self, frame: Frame, message: mo.InvalidateObject) -> None:
        self._reply(frame.request_id, m.Count(self._core.invalidate_object(message.object_id)))


#: Entered in the table of :mod:`shared_rpc.server.requests`.
MONITORING_HANDLERS: dict[type[m.Message], Callable[[Any, Frame, Any], None]] = {
    mo.ListSessions: MonitoringRequests._list_sessions,
    mo.ListRuns: MonitoringRequests._list_runs,
    mo.GetStatistics: MonitoringRequests._get_statistics,
    mo.InvalidateObject: MonitoringRequests._invalidate_object,
}
