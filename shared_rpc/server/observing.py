"""Events of a server: the outcome and duration of each call, changes of objects, and leases."""

from __future__ import annotations

import time
from typing import Any

from shared_rpc.execution.outcomes import Failure
from shared_rpc.observability.events import (
    HOOKS,
    CallFinished,
    CallStarted,
    LeaseEnded,
    LeaseGiven,
    MoveReason,
    ObjectEvicted,
    ObjectFreed,
    ObjectPublished,
    ObjectRestored,
    Outcome,
)
from shared_rpc.protocol.infos import MoveInfo
from shared_rpc.protocol.records import Tier
from shared_rpc.server.state.leases import Holder
from shared_rpc.server.state.objects import StoredObject


class Observed:
    """One call. Creating it reports the beginning; the end is reported once."""

    __slots__ = ("_began", "_call", "_ended")

    def __init__(self, server_id: str, endpoint: str, request_id: str, session: str, pid: int) -> None:
        self._call: dict[str, Any] = {
            "server_id": server_id,
            "endpoint": endpoint,
            "request_id": request_id,
            "session": session,
            "pid": pid,
        }
        self._ended = False
        self._began = time.monotonic()
        HOOKS.emit(CallStarted(**self._call))

    def answered(self, outcome: object, how: Outcome) -> None:
        """Report the caller's outcome; ``how`` it came about if it is a result."""
        if isinstance(outcome, Failure):
            self._finish("failed", outcome.code)
        else:
            self._finish(how)

    def left(self) -> None:
        """Report that the caller no longer waits."""
        self._finish("left")

    def _finish(self, outcome: Outcome, error: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        HOOKS.emit(CallFinished(**self._call, outcome=outcome, seconds=time.monotonic() - self._began, error=error))


class Listeners:
    """Reports the events of a server's tables."""

    def __init__(self, server_id: str) -> None:
        self._server_id = server_id

    def added(self, stored: StoredObject) -> None:
        """Report a new object."""
        if HOOKS.registered:
            HOOKS.emit(ObjectPublished(**self._object(stored), generation=stored.generation))

    def freed(self, stored: StoredObject) -> None:
        """Report a dropped object."""
        if HOOKS.registered:
            HOOKS.emit(ObjectFreed(**self._object(stored)))

    def moved(self, stored: StoredObject, from_tier: Tier, move: MoveInfo, reason: MoveReason) -> None:
        """Report that an object changed its tier."""
        if HOOKS.registered:
            fields = {**self._object(stored), "from_tier": from_tier, "to_tier": move["tier"], "reason": reason}
            fields |= {name: move[name] for name in ("nbytes", "copied", "seconds")}
            del fields["kind"]
            HOOKS.emit((ObjectRestored if move["tier"] == "device" else ObjectEvicted)(**fields))

    def _object(self, stored: StoredObject) -> dict[str, Any]:
        return {
            "server_id": self._server_id,
            "object_id": stored.object_id,
            "endpoint": stored.endpoint,
            "kind": stored.kind,
            "nbytes": stored.record.nbytes,
            "device": stored.record.device,
        }

    def given(self, holder: Holder, object_id: str) -> None:
        """Report a new lease of a session or a task."""
        if HOOKS.registered:
            HOOKS.emit(LeaseGiven(server_id=self._server_id, object_id=object_id, **_named(holder)))

    def ended(self, holder: Holder, object_id: str, reclaimed: bool) -> None:
        """Report the end of a lease of a session or a task."""
        if HOOKS.registered:
            HOOKS.emit(LeaseEnded(server_id=self._server_id, object_id=object_id, **_named(holder), reclaimed=reclaimed))


def _named(holder: Holder) -> dict[str, Any]:
    """Return the fields of an event that name a holder."""
    return {"kind": "session", "session": holder} if isinstance(holder, str) else {"kind": "task", "session": holder.task_id}
