"""Kills for want of memory: whoever the kernel kills so sees a SIGKILL as any other, and the kernel counts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["kills"]

#: Counts kills of the whole host, and of control groups at their limits; see proc(5). From Linux 4.13 on.
_COUNTS = Path("/proc/vmstat")


def kills() -> int:
    """How many processes of the host the kernel has killed for want of memory since it was started; 0 where it does not say."""
    with suppress(OSError):
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
