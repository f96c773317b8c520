"""The end of an unused server."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

#: The longest and the shortest time between two checks, in seconds.
_LONGEST, _SHORTEST = 30.0, 0.02


async def wait_until_idle(seconds: float, look: Callable[[], tuple[bool, int]]) -> None:
    """Return when the server has been unused for that long: not earlier, and at most two looks later.

    It looks ten times in ``seconds``, at least every 30 s. Between the last look and the return nothing happens on the loop.

    :param look: returns whether the server is in use, and a number that changes with any use since the last look.
    """
    pause = max(min(seconds / 10, _LONGEST), _SHORTEST)
    quiet_since: float | None = None
    earlier = -1
    while True:
        used, count = look()
        now = time.monotonic()
        if used or count != earlier:
            quiet_since, earlier = None, count
        elif quiet_since is None:
            quiet_since = now
        elif now - quiet_since >= seconds:
            return
        await anyio.sleep(pause)
