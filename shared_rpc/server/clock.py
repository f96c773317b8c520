"""The clock by which a server's objects, buffers and tasks expire."""

from __future__ import annotations

import time

__all__ = ["BootClock"]


class BootClock:
    """Seconds since the host was started (CLOCK_BOOTTIME); see :class:`shared_rpc.server.state.clock.Clock`.

    They go on while the host sleeps, do not jump when somebody sets the time, and mean the same to the next process.
    """

    def now(self) -> float:
        """This moment."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def unix(self, moment: float) -> float:
        """A moment in Unix seconds, as the host's time is set now."""
        return time.time() - self.now() + moment
