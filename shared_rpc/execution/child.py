"""A child process: how its end is watched and brought about, how it ended, and the pauses before it is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import IO, Any, Protocol

import anyio

from shared_rpc.observability.stderr import Tail

#: Seconds to wait for the end of a child's output, and between two checks.
_PATIENCE, _LOOK = 0.2, 0.005


class Process(Protocol):
    """The part of :class:`subprocess.Popen` that a :class:`Child` uses."""

    pid: int
    returncode: Any

    def kill(self) -> None:
        """Send SIGKILL, if it was not waited for."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise subprocess.TimeoutExpired if it has not ended within so many seconds."""


class Child:
    """A child process, on one loop only, which never waits for it. It is killed if it cannot be watched.

    :param output: the reading end of a pipe, with its standard error.
    :param ended: called once, when it has ended and was reaped.
    :param passes_on: whether its output goes to this process's standard error too.
    :param fd: a descriptor that is readable when it has ended, and closed when it was waited for; None for a pidfd.
    :raises OSError, RuntimeError: without a descriptor or a thread for it.
    """

    def __init__(
        self, process: Process, output: IO[bytes] | None, ended: Callable[[], object], passes_on: bool = True, fd: int = -1
    ) -> None:
        self.pid = process.pid
        #: Set when it has ended and was reaped.
        self.gone = asyncio.Event()
        self._process = process
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        with ExitStack() as undo:
            # It has just begun, so SIGKILL ends it at once; without the wait it would stay a zombie.
            undo.callback(process.wait)
            undo.callback(process.kill)
            assert output is not None, "its output is a pipe"
            self._tail = Tail(output, passes_on)
            if fd < 0:
                fd = self._pidfd = os.pidfd_open(process.pid)
                undo.callback(os.close, fd)
            self._loop.add_reader(fd, self._gone)
            self._fd = fd
            undo.pop_all()

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def end(self, until: float) -> None:
        """Wait for its end until a time by the monotonic clock, then kill it. Its end is not reported."""
        self.unwatch()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(until - time.monotonic(), 0))
        self.kill()
        self._process.wait()

    async def reap(self, seconds: float) -> None:
        """Kill it, and wait for its end for so long: a system call may hold it up, after which it ends."""
        self.kill()
        with anyio.CancelScope(shield=True), anyio.move_on_after(seconds):
            await self.gone.wait()
        self.unwatch()

    def unwatch(self) -> None:
        """Have its end not reported."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._fd = self._pidfd = -1

    def _gone(self) -> None:
        self.unwatch()
        self._process.wait()
        self._report(time.monotonic() + _PATIENCE)

    def _report(self, until: float) -> None:
        """Report the end, with all output; a grandchild may keep the pipe open."""
        if not self._tail.ended and time.monotonic() < until:
            self._loop.call_later(_LOOK, self._report, until)
            return
        self.gone.set()
        self._ended()

    @property
    def code(self) -> int | None:
        """Its exit code, or the number of the signal that ended it below 0; None while it was not waited for."""
        code: int | None = self._process.returncode
        return code

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that ended it, if one did."""
        if self.code is None or self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.code}"

    def how(self) -> str:
        """Return how it ended, as the rest of a sentence."""
        if self.code is None:
            return "hung up"
        return f"was killed by {self.signal_name}" if self.signal_name else f"exited with code {self.code}"

    def last_output(self) -> str:
        """Return the last lines of its output, when its end was reported."""
        return self._tail.text()


def last_lines(text: str) -> str:
    """Return the end of an output, in one line."""
    return " | ".join(line.strip() for line in text.splitlines()[-3:])


class Backoff:
    """The pauses before a process that has ended is started again: twice as long after each further one that ended soon.

    :param first: seconds, after one that has ended soon, or not soon.
    :param longest: seconds at most.
    :param soon: seconds of life below which a process has ended soon.
    """

    def __init__(self, first: float, longest: float, soon: float) -> None:
        self._first, self._longest, self._soon = first, longest, soon
        self._in_succession = 0

    def note(self, lived: float) -> None:
        """Take in that a process has ended, after so many seconds."""
        self._in_succession = self._in_succession + 1 if lived < self._soon else 0

    @property
    def pause(self) -> float:
        """Seconds before the next start."""
        return min(self._first * 2.0 ** max(self._in_succession - 1, 0), self._longest)
