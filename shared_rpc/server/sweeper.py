"""Expiry: the clock of a server, and the job that drops expired entries in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio

from shared_rpc.server.state import Clock

_log = logging.getLogger("shared_rpc.server")

#: Maximum seconds between two checks, if anything can expire.
_LONGEST = 60.0


class BootClock:
    """Seconds since the host was started (CLOCK_BOOTTIME).

    They continue while the host sleeps, do not jump when the time is set, and have the same meaning in the next process.
    """

    def now(self) -> float:
        """Return the current time."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def unix(self, moment: float) -> float:
        """Convert a time to Unix seconds, by the host's current clock."""
        return time.time() - self.now() + moment


class Sweeper:
    """The job that drops expired entries, on one event loop.

    :param clock: the clock of the entries.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: The time of the next check, on that clock.
        self._next_check = float("inf")
        self._wake: anyio.Event | None = None

    def wake_within(self, seconds: float) -> None:
        """Check again within so many seconds, when something may expire."""
        at = self._clock.now() + seconds
        if at < self._next_check:
            self._next_check = at
            if self._wake is not None:
                self._wake.set()

    async def run(self, *expire: Callable[[], float | None]) -> None:
        """Sweep until cancelled.

        :param expire: each drops expired entries, and returns the seconds until the next expiry, None for never.
        """
        while True:
            # An entry's drop may require an earlier check of a function that was already called.
            self._next_check, self._wake = float("inf"), None
            for drop in expire:
                pause = _pause_after(drop)
                if pause is not None:
                    self.wake_within(pause)
            self._wake = anyio.Event()
            pause = max(self._next_check - self._clock.now(), 0.0)
            # The loop's clock stops while the host sleeps.
            with anyio.move_on_after(min(pause, _LONGEST) if pause < float("inf") else pause):
                await self._wake.wait()


def _pause_after(drop: Callable[[], float | None]) -> float | None:
    """Drop expired entries; return the seconds until the next expiry, or until a retry after an error."""
    try:
        return drop()
    except Exception:
        _log.exception("cannot drop what has expired; trying again in %g s", _LONGEST)
        return _LONGEST
