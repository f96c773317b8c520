"""Time of a store: expiry uses a clock that is never set, and people see Unix time."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Seconds since some moment; they never jump."""

    def now(self) -> float:
        """Return this moment."""

    def unix(self, moment: float) -> float:
        """Return a moment in Unix seconds."""
