"""State of a server: objects, calls in flight, leases. No I/O, no clock, no threads, no torch."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Seconds since some moment; they never jump. Expiry uses such a clock, and people see Unix time."""

    def now(self) -> float:
        """Return this moment."""

    def unix(self, moment: float) -> float:
        """Return a moment in Unix seconds."""
