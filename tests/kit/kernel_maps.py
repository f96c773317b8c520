"""What the kernel says of this process's mappings."""

from __future__ import annotations

__all__ = ["rights"]


def rights(address: int) -> str:
    """How the kernel has an address mapped, as ``"rw-s"``; ``""`` if it has not."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            if begin <= address < end:
                return line.split()[1]
    return ""
