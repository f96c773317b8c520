"""Limits of file descriptors.

The number of descriptors of a process is limited. Objects, with one per segment and one per page of revisions, leave some
for new clients, and clients leave some for workers and the memory of active calls.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from shared_rpc.execution.stream import FramedStream
from shared_rpc.protocol.infos import DescriptorInfo

#: 1/16 of the descriptors is reserved for workers and the memory of calls; it is not used to admit clients.
_RESERVE = 16
#: When less than 1/4 of them is left, no object gets another, and the connection with the most descriptors is ended, unless it
#: holds less than 1/16.
_SPARE, _FAIR = 4, 16
#: Maximum bytes of incomplete frames of all connections together, besides the largest frame.
_PARTIAL = 128 << 20
#: Seconds without a byte after which an incomplete frame ends its connection.
STALLED = 60.0


def open_limit() -> int:
    """Return the maximum number of descriptors that this process may have open now (the soft RLIMIT_NOFILE)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def mapped_limit() -> int:
    """Return the maximum number of descriptors whose memory this process may have mapped, too (vm.max_map_count)."""
    try:
        mapped = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        mapped = 65530  # the kernel's default of vm.max_map_count
    return min(open_limit(), mapped)


class Descriptors:
    """The descriptors of a process, for servers on one event loop.

    :param available: returns the process's limit of descriptors, which can change while it runs.
    :param closing: returns the number of descriptors of dropped objects that are being closed.
    """

    def __init__(self, available: Callable[[], int] = open_limit, closing: Callable[[], int] = lambda: 0) -> None:
        self.available = available
        self.closing = closing
        self.intake = Intake(self)

    @property
    def share(self) -> int:
        """The maximum number of unread descriptors of one connection."""
        return self.available() // _FAIR

    def are_scarce(self, newest: int, reserve: int = _RESERVE) -> bool:
        """Return True if few are left, by the number of a newly opened one: the kernel gives the lowest free number.
        Descriptors that are being closed count as free.
        """
        available = self.available()
        return newest - self.closing() >= available - available // reserve

    def admit_objects(self) -> bool:
        """Return True if enough are left for an object."""
        try:
            newest = os.open("/", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return False
        os.close(newest)
        return not self.are_scarce(newest, _SPARE)

    def info(self) -> DescriptorInfo:
        """Return the number of open descriptors of the process, and its limit."""
        return {"used": len(os.listdir("/proc/self/fd")), "limit": self.available()}


class Intake:
    """Unfinished work of the connections of all servers of this process: incomplete frames, and unread answers. A connection
    that exhausts shared resources is ended. On one event loop. All times are of one clock.
    """

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        #: The functions that end a connection in a later turn of the loop, because of the given reason.
        self.connections: dict[FramedStream, Callable[[str], None]] = {}
        #: Bytes of an incomplete frame and the time of its last byte, by connection; oldest first.
        self._partial: dict[FramedStream, tuple[int, float]] = {}
        self._nbytes = 0

    def note(self, connection: FramedStream, nbytes: int, now: float = 0.0) -> None:
        """Record the bytes of a connection's incomplete frame."""
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

        :param newest: a newly received or opened descriptor.
        """
        if self._descriptors.are_scarce(newest, _SPARE) and self.connections:
            most = max(self.connections, key=lambda connection: connection.held_fds)
            if most.held_fds > self._descriptors.share:
                text = f"it holds {most.held_fds} of {self._descriptors.available()} descriptors, more than any other"
                self._end(most, f"{text}: read answers, and complete frames, before asking for more")

    def leave(self, connection: FramedStream) -> None:
        """Forget a connection that has ended."""
        self.connections.pop(connection, None)
        self.note(connection, 0)

    def _end(self, connection: FramedStream, why: str) -> None:
        end = self.connections[connection]
        self.leave(connection)  # it is ended once
        end(why)

    def expire(self, now: float) -> float | None:
        """End connections whose frames make no progress; return the seconds until the next check, None for never."""
        for connection, (nbytes, since) in tuple(self._partial.items()):
            if connection.paused:
                self.note(connection, nbytes, now)
            elif now - since >= STALLED:
                self._end(connection, f"{nbytes} bytes of an incomplete frame, and nothing further for {STALLED:g} s")
        return min((since + STALLED - now for _, since in self._partial.values()), default=None)
