"""The time of a server: what expires counts by a clock that nobody sets, and people see Unix time."""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Seconds since the host was started (CLOCK_BOOTTIME).

    They go on while the host sleeps, do not jump when somebody sets the time, and mean the same to the next process.
    """

    def now(self) -> float:
        """This moment."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def unix(self, moment: float) -> float:
        """A moment in Unix seconds, as the host's time is set now."""
        return time.time() - self.now() + moment
