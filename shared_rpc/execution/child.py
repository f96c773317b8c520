"""A child process: watching and ending it, its exit status, and the pauses before restarts."""

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

#: Seconds to wait for the last output of a child, and between two polls for it.
_PATIENCE, _LOOK = 0.2, 0.005


class Process(Protocol):
    """The part of :class:`subprocess.Popen` that a :class:`Child` uses."""

    pid: int
    returncode: Any

    def kill(self) -> None:
        """Send SIGKILL, unless the process was already reaped."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; raise subprocess.TimeoutExpired after ``timeout`` seconds."""


class Child:
    """A child process, used on one loop only, which is never blocked by it. It is killed if it cannot be watched.

    :param output: the reading end of a pipe from the child's standard error.
    :param ended: called once, after the child has ended and was reaped.
    :param passes_on: True to copy its output to this process's standard error.
    :param fd: a descriptor that becomes readable when the child has ended, closed after the reaping; -1 for a pidfd.
    :raises OSError, RuntimeError: if no descriptor or thread is available to watch it.
    """

    def __init__(
        self, process: Process, output: IO[bytes] | None, ended: Callable[[], object], passes_on: bool = True, fd: int = -1
    ) -> None:
        self.pid = process.pid
        #: Set when the child has ended and was reaped.
        self.exited = asyncio.Event()
        self._process = process
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        with ExitStack() as undo:
            # SIGKILL ends a process that has just begun at once; without the wait it would stay a zombie.
            undo.callback(process.wait)
            undo.callback(process.kill)
            assert output is not None, "its output is a pipe"
            self._tail = Tail(output, passes_on)
            if fd < 0:
                fd = self._pidfd = os.pidfd_open(process.pid)
                undo.callback(os.close, fd)
            self._loop.add_reader(fd, self._on_exit)
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
        """Wait for the end until the given time of the monotonic clock, then kill the child. Its end is not reported."""
        self.unwatch()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(until - time.monotonic(), 0))
        self.kill()
        self._process.wait()

    async def reap(self, seconds: float) -> None:
        """Kill the child and wait at most this long for its end, which a system call may delay."""
        self.kill()
        with anyio.CancelScope(shield=True), anyio.move_on_after(seconds):
            await self.exited.wait()
        self.unwatch()

    def unwatch(self) -> None:
        """Stop watching the child: its end is not reported."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._fd = self._pidfd = -1

    def _on_exit(self) -> None:
        self.unwatch()
        self._process.wait()
        self._report(time.monotonic() + _PATIENCE)

    def _report(self, until: float) -> None:
        """Report the end after all output; a grandchild may keep the pipe open."""
        if not self._tail.ended and time.monotonic() < until:
            self._loop.call_later(_LOOK, self._report, until)
            return
        self.exited.set()
        self._ended()

    @property
    def code(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the child; None until it is reaped."""
        code: int | None = self._process.returncode
        return code

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that ended the child, if any."""
        if self.code is None or self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.code}"

    def how(self) -> str:
        """Describe how the child ended, as the rest of a sentence."""
        if self.code is None:
            return "hung up"
        return f"was killed by {self.signal_name}" if self.signal_name else f"exited with code {self.code}"

    def last_output(self) -> str:
        """Return the last lines of output, available once the end was reported."""
        return self._tail.text()


def last_lines(text: str) -> str:
    """Return the end of an output as one line."""
    return " | ".join(line.strip() for line in text.splitlines()[-3:])


class Backoff:
    """Pauses before restarts of a process, doubled after each further one that ended soon.

    :param first: initial pause in seconds, also after a process that did not end soon.
    :param longest: maximum pause in seconds.
    :param soon: lifetime in seconds below which a process counts as having ended soon.
    """

    def __init__(self, first: float, longest: float, soon: float) -> None:
        self._first, self._longest, self._soon = first, longest, soon
        self._in_succession = 0

    def note(self, lived: float) -> None:
        """Record the end of a process that lived for this many seconds."""
        self._in_succession = self._in_succession + 1 if lived < self._soon else 0

    @property
    def pause(self) -> float:
        """Seconds before the next start."""
        return min(self._first * 2.0 ** max(self._in_succession - 1, 0), self._longest)
