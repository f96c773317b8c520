"""The kernel's count of its kills for want of memory, each of which looks like any other SIGKILL."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["oom_kills"]

#: The kernel's counters; `oom_kill` counts kills of the whole host and of control groups at their limits. Linux 4.13, proc(5).
_COUNTS = Path("/proc/vmstat")


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since it was started; 0 where it does not say."""
    with suppress(OSError):
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
