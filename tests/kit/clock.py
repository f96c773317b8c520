"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        """Return seconds since something."""
        return self.time

    def unix(self, moment: float) -> float:
        """Return the same: the clock was started with the host."""
        return moment
