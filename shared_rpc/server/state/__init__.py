"""State of a server: objects, active calls, leases. No I/O, no clock, no threads, no torch."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds, with an arbitrary zero. Expiry uses such a clock; Unix time is for display."""

    def now(self) -> float:
        """Return the current time."""

    def unix(self, moment: float) -> float:
        """Convert a time to Unix seconds."""
