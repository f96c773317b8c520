"""Has everything that expires dropped in time, and sleeps in between."""

from __future__ import annotations

from collections.abc import Callable

import anyio

__all__ = ["Sweeper"]


class Sweeper:
    """On one event loop.

    :param now: the clock of those who expire.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: When it looks next, on that clock.
        self._looks_at = float("inf")
        self._wake: anyio.Event | None = None

    def look_within(self, seconds: float) -> None:
        """Something may expire then; it sleeps no longer than that."""
        if self._wake is not None and self._now() + seconds < self._looks_at:
            self._wake.set()

    async def run(self, *expire: Callable[[], float | None]) -> None:
        """Sweep until cancelled.

        :param expire: each drops what has expired, and returns the seconds until there is more, None if nothing will expire.
        """
        while True:
            self._wake = awake = anyio.Event()
            pause = min((pause for drop in expire if (pause := drop()) is not None), default=float("inf"))
            self._looks_at = self._now() + pause
            with anyio.move_on_after(pause):
                await awake.wait()
