"""The kernel's count of its kills for want of memory, each of which looks like any other SIGKILL."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["oom_kills"]

#: Counts kills of the whole host, and of control groups at their limits; see proc(5). From Linux 4.13 on.
_COUNTS = Path("/proc/vmstat")


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since it was started; 0 where it does not say."""
    with suppress(OSError):
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
