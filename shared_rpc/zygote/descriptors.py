"""The open descriptors of this process."""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["close_all_but", "open_descriptors"]


def open_descriptors() -> list[int]:
    """Return the numbers of all open descriptors, the least one first."""
    found = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            os.fstat(fd)
        except OSError:  # the descriptor of the listing itself
            continue
        found.append(fd)
    return found


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor that is not among these."""
    stay = sorted(kept)
    for first, last in zip([-1, *stay], [*stay, open_descriptors()[-1] + 1], strict=True):
        if first + 1 < last:
            os.closerange(first + 1, last)
