"""The end of a server's process, as its clients see it."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from types import TracebackType

from shared_rpc.errors import DeadlineExceeded

#: Seconds between two checks of a process without a pidfd.
_LOOK = 0.05


class ProcessExit:
    """The end of a server; the next one that listens at ``path`` does not count.

    :param pid: of the process that answers there, which need not be the one that listened. A server in another pid namespace,
        whose pid is 0, has ended when no process listens.
    """

    def __init__(self, path: str, pid: int) -> None:
        self._path = path
        self._pidfd = -1
        if pid:
            with suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None) -> None:
        """Wait until the process has ended.

        :raises DeadlineExceeded: after ``timeout`` seconds.
        """
        until = time.monotonic() + timeout if timeout is not None else float("inf")
        while not self._gone():
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the server at {self._path} was told to end, but still runs after {timeout:g} s")

    def _gone(self) -> bool:
        """Look, and wait a moment if it is not."""
        if self._pidfd >= 0:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            return bool(ended.poll(_LOOK * 1000))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
            if probe.connect_ex(self._path):
                return True
        time.sleep(_LOOK)
        return False

    def __enter__(self) -> ProcessExit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
