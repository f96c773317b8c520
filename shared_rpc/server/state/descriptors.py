"""Budget of file descriptors that the objects of a process may have.

A process has a limited number of them, and needs some for new clients, for workers, and for the memory of calls under
way. What is kept, which is one for each segment and for each page of revisions, gets a share, and is kept to it as to bytes.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

from shared_rpc.protocol.infos import DescriptorInfo

__all__ = ["Descriptors", "mapped_limit", "open_limit"]

#: This fraction of a process's descriptors, and of its mappings, is for kept objects.
_SHARE = 2
#: This fraction of the descriptors is for workers and the memory of calls, before more clients are admitted.
_RESERVE = 16


def open_limit() -> int:
    """Return how many descriptors this process may have open now (RLIMIT_NOFILE, the soft one)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def mapped_limit() -> int:
    """Return how many mappings a process may have (vm.max_map_count)."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65530  # the kernel's default of vm.max_map_count


class Descriptors:
    """The descriptors of objects, of all servers of this process together. On one event loop.

    :param available: how many descriptors the process may have now; it can be changed while it runs.
    :param mapped: how many mappings it may have, if it maps kept objects.
    :param closing: how many descriptors of dropped objects are being closed.
    """

    def __init__(
        self,
        available: Callable[[], int] = open_limit,
        mapped: int | None = None,
        closing: Callable[[], int] = lambda: 0,
    ) -> None:
        self.available = available
        self.closing = closing
        self._mapped = mapped
        #: Descriptors that objects have or have reserved.
        self.used = 0

    @property
    def limit(self) -> int:
        """The number of descriptors that objects may have."""
        return min(self.available(), self._mapped or sys.maxsize) // _SHARE

    def are_scarce(self, newest: int) -> bool:
        """Return whether few are left, by the number of one opened just now: the kernel gives the lowest that is free. Those
        that are being closed are left too.
        """
        available = self.available()
        return newest - self.closing() >= available - available // _RESERVE

    def info(self) -> DescriptorInfo:
        """Return how many objects have, how many they may have, and how many the process may."""
        return {"used": self.used, "limit": self.limit, "available": self.available()}
