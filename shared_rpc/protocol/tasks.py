"""Descriptions of tasks."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class TaskStatus(StrEnum):
    """The status of a task; it is also a plain string, ``"pending"`` for instance."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def finished(self) -> bool:
        """True if no other status follows."""
        return self not in (TaskStatus.PENDING, TaskStatus.RUNNING)


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The latest progress of an endpoint: ``done`` of ``total`` (None if unknown), and a text."""

    done: float
    total: float | None = None
    message: str = ""


class TaskInfo(msgspec.Struct, frozen=True, gc=False):
    """A snapshot of a task. Times are Unix seconds, None for future events.

    ``cancel_requested``: the running task was asked to stop; its ``status`` shows the effect.
    ``error_type`` and ``error_message`` are those of a failed task. ``object_id`` is the result's. ``waits_for`` describes, for
    a task that waits for capacity on a device, the amount that it needs and the holders.
    """

    task_id: str
    endpoint: str
    status: TaskStatus
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    progress: Progress | None = None
    cancel_requested: bool = False
    error_type: str | None = None
    error_message: str | None = None
    cache_key: str | None = None
    object_id: str | None = None
    waits_for: str | None = None
