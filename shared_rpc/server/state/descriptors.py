"""Budget of file descriptors that the objects of a process may have.

A process has a limited number of them, and needs some for new clients, for workers, and for the memory of calls under
way. What is kept, which is one for each segment and for each page of revisions, gets a share, and is kept to it as to bytes.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shared_rpc.protocol.infos import DescriptorInfo

#: This fraction of a process's descriptors, and of its mappings, is for kept objects.
_SHARE = 2
#: This fraction of the descriptors is for workers and the memory of calls, before more clients are admitted.
_RESERVE = 16
#: This fraction is left when the connection that holds most of them is ended; a connection that holds less than the second
#: fraction is not.
_SPARE, _FAIR = 4, 16
#: Bytes of incomplete frames of all connections together, besides the largest frame.
_PARTIAL = 128 << 20
#: Seconds without a byte after which an incomplete frame ends its connection.
STALLED = 60.0


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
    """The descriptors of the objects of servers on one event loop, which have a share of the process's together with others.

    :param available: how many descriptors the process may have now; it can be changed while it runs.
    :param mapped: how many mappings it may have, if it maps kept objects.
    :param closing: how many descriptors of dropped objects are being closed.
    :param others: how many descriptors the objects of this process's servers on other event loops have.
    """

    def __init__(
        self,
        available: Callable[[], int] = open_limit,
        mapped: int | None = None,
        closing: Callable[[], int] = lambda: 0,
        others: Callable[[], int] = lambda: 0,
    ) -> None:
        self.available = available
        self.closing = closing
        self._mapped = mapped
        self.intake = Intake(self)
        self._others = others
        #: Descriptors that objects have or have reserved.
        self.used = 0

    @property
    def limit(self) -> int:
        """The number of descriptors that objects may have."""
        return max(0, min(self.available(), self._mapped or sys.maxsize) // _SHARE - self._others())

    @property
    def share(self) -> int:
        """The number of descriptors that one connection may leave unread."""
        return self.available() // _FAIR

    def are_scarce(self, newest: int, reserve: int = _RESERVE) -> bool:
        """Return whether few are left, by the number of one opened just now: the kernel gives the lowest that is free. Those
        that are being closed are left too.
        """
        available = self.available()
        return newest - self.closing() >= available - available // reserve

    def info(self) -> DescriptorInfo:
        """Return how many objects have, how many they may have, and how many the process may."""
        return {"used": self.used, "limit": self.limit, "available": self.available()}


class LimitedConnection(Protocol):
    """A connection, as far as what it holds is limited."""

    @property
    def held_fds(self) -> int:
        """Descriptors of incomplete frames, and of answers that the client has not read."""

    @property
    def paused(self) -> bool:
        """Whether nothing is read from the client, because it does not read."""

    def end(self, why: str) -> None:
        """End it, in a later turn of the loop."""


class Intake:
    """Unfinished work of the connections of all servers of this process: frames that have begun, and answers that
    are not read. The connection that takes what the others need is ended. On one event loop. Times are of one clock.
    """

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self.connections: set[LimitedConnection] = set()
        #: Bytes of an incomplete frame and the time of its last byte, by connection; the oldest first.
        self._partial: dict[LimitedConnection, tuple[int, float]] = {}
        self._nbytes = 0

    def note(self, connection: LimitedConnection, nbytes: int, now: float = 0.0) -> None:
        """Note the bytes that a connection has sent of an incomplete frame."""
        before, _ = self._partial.pop(connection, (0, 0.0))
        self._nbytes += nbytes - before
        if not nbytes:
            return
        self._partial[connection] = nbytes, now
        if self._nbytes > _PARTIAL and self._nbytes - max(self._partial.values())[0] > _PARTIAL:
            text = f"incomplete frames of all connections have {self._nbytes} bytes, and this one is the oldest"
            self._end(next(iter(self._partial)), text)

    def check(self, newest: int) -> None:
        """End the connection that holds the most descriptors, if few are left.

        :param newest: a descriptor that was received or opened just now.
        """
        if self._descriptors.are_scarce(newest, _SPARE) and self.connections:
            most = max(self.connections, key=lambda connection: connection.held_fds)
            if most.held_fds > self._descriptors.share:
                text = f"it holds {most.held_fds} of {self._descriptors.available()} descriptors, more than any other"
                self._end(most, f"{text}: read answers, and complete frames, before asking for more")

    def leave(self, connection: LimitedConnection) -> None:
        """Forget a connection that has ended."""
        self.connections.discard(connection)
        self.note(connection, 0)

    def _end(self, connection: LimitedConnection, why: str) -> None:
        self.leave(connection)  # it is ended once
        connection.end(why)

    def expire(self, now: float) -> float | None:
        """End connections whose frames make no progress; return the seconds until there may be more, None for never."""
        for connection, (nbytes, since) in tuple(self._partial.items()):
            if connection.paused:
                self.note(connection, nbytes, now)
            elif now - since >= STALLED:
                self._end(connection, f"{nbytes} bytes of an incomplete frame, and nothing further for {STALLED:g} s")
        return min((since + STALLED - now for _, since in self._partial.values()), default=None)
