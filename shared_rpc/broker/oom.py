"""The kernel's count of its kills for want of memory, each of which looks like any other SIGKILL."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["oom_kills"]

#: The kernel's counters; `oom_kill` counts kills of the whole host and of control groups at their limits. Linux 4.13, proc(5).
_COUNTS = Path("/proc/vmstat")


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot; 0 if the counter is missing."""
    with suppress(OSError):
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
