"""A clock that the test sets."""

from __future__ import annotations


class Clock:
    """Seconds that the test advances."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        """Return seconds since an arbitrary instant."""
        return self.time

    def unix(self, moment: float) -> float:
        """Return the same: the host started at the epoch."""
        return moment
