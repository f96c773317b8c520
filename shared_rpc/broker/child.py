"""A process of a broker: its end, which the loop watches and never waits for, and what it wrote last."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack

from shared_rpc.observability.stderr import Tail
from shared_rpc.zygote.process import ForkedProcess

__all__ = ["Child", "last_lines"]


class Child:
    """A child process, on the broker's loop only. It is killed if it cannot be watched.

    :param process: its standard error is a pipe.
    :param ended: called once, when it has ended and was reaped.
    :param passes_on: whether what it writes to standard error goes to the broker's too.
    :raises OSError, RuntimeError: without a descriptor or a thread for it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | ForkedProcess, ended: Callable[[], None], passes_on: bool = True
    ) -> None:
        self.process = process
        self.pid = process.pid
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            # It has just begun, so SIGKILL ends it at once; without the wait it would stay a zombie.
            undo.callback(process.wait)
            undo.callback(process.kill)
            assert process.stderr is not None, "standard error is a pipe"
            self._tail = Tail(process.stderr, passes_on)
            self._pidfd = os.pidfd_open(process.pid)
            undo.callback(os.close, self._pidfd)
            self._loop.add_reader(self._pidfd, self._gone)
            undo.pop_all()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()

    def unwatch(self) -> None:
        """Have its end not reported."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _gone(self) -> None:
        self.process.wait()
        self.unwatch()
        self._ended()

    @property
    def code(self) -> int | None:
        """Its exit code, or the number of the signal that ended it below 0; None while it was not waited for."""
        return self.process.returncode

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
        """Return the last lines of its standard error, when it has ended; a grandchild may keep the pipe open for a moment."""
        return self._tail.text()


def last_lines(text: str) -> str:
    """Return the end of an output, in one line."""
    return " | ".join(line.strip() for line in text.splitlines()[-3:])
