"""Real child processes that communicate by lines, and waits for other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

from tests.kit.forks import NO_FORK_WARNING, PYTHONPATH, ROOT, start

__all__ = ["PYTHONPATH", "ROOT", "Child", "eventually", "links_of", "open_fds", "python", "rights"]


class Child:
    """A Python process running ``code``; it prints lines for :meth:`expect`, and reads those of :meth:`tell`.

    :param options: of the interpreter.
    :param before: a command line that starts the interpreter, such as ``unshare``.
    :param fresh: True for a new process rather than a fork, see :func:`tests.kit.forks.start`.
    """

    def __init__(
        self,
        *arguments: str,
        environ: dict[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        options: Sequence[str] = ("-u",),
        fresh: bool = False,
        before: Sequence[str] = (),
    ) -> None:
        self.process = start(
            [*before, sys.executable, *options, *arguments],
            fresh=fresh,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            pass_fds=pass_fds,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": NO_FORK_WARNING, **(environ or {})},
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def expect(self, text: str) -> str:
        """Read lines of its standard output until one contains ``text``, and return it."""
        return self._expect(self.process.stdout, text)

    def expect_error(self, text: str) -> str:
        """Read lines of its standard error until one contains ``text``, and return it."""
        return self._expect(self.process.stderr, text)

    def _expect(self, stream: IO[str] | None, text: str) -> str:
        assert stream is not None
        seen = []
        for line in stream:
            seen.append(line)
            if text in line:
                return line.rstrip("\n")
        self.process.wait()
        assert self.process.stderr is not None
        raise AssertionError(f"{text!r} was not printed; but: {''.join(seen)}; stderr: {self.process.stderr.read()}")

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, order: str, answer: str) -> str:
        """Have it do something; the rest of the line that it then prints, which begins with ``answer``."""
        self.tell(order)
        return self.expect(answer).removeprefix(answer).strip()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.close(signal.SIGKILL)

    def close(self, number: int = 0) -> tuple[int, str]:
        """Send a signal, if one is given, and wait for the end; return the exit code and the text on standard error."""
        if number:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=50)
        return self.process.returncode, errors


def skip_without_late_threads() -> None:
    """Skip a test of a script that serves after its main code, on Pythons that start no threads then."""
    if (3, 12) <= sys.version_info[:3] < (3, 12, 3):
        pytest.skip("Python 3.12.0 to 3.12.2 start no threads once the main program has ended (python/cpython#113964)")


def python(code: str, *arguments: str, **options: Any) -> Child:
    """Start a child that runs a piece of code; the options are those of :class:`Child`."""
    return Child("-c", textwrap.dedent(code), *arguments, **options)


def eventually(condition: Callable[[], bool], seconds: float = 10.0, what: str = "", every: float = 0.002) -> float:
    """Wait until another process or thread has made ``condition`` true; return the elapsed seconds.

    :param every: seconds between two checks: more if a check is itself work for several processes.
    """
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(every)
    return time.monotonic() - begin


def sigstop(pid: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs: one runs on until another has taken the signal."""
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        states = []
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                suppress(FileNotFoundError),
                open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii", errors="replace") as stat,
            ):
                states.append(stat.read().rpartition(")")[2].split()[0])
        return set(states) == {"T"}

    eventually(stopped, 30.0, f"pid {pid} stopped")


def links_of(pid: int | str = "self") -> list[str]:
    """Return the targets of a process's descriptors, as named by the kernel; nothing for a process that has ended."""
    found = []
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed in the meantime
                found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def open_fds() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def mapped_segments() -> int:
    """Return the number of segments that this process maps, after unused ones were unmapped."""
    from shared_rpc.memory.mapping import MAPPINGS

    MAPPINGS.drain()
    return len(MAPPINGS)


def rights(address: int) -> str:
    """Return the kernel's flags of the mapping at an address of this process, as ``"rw-s"``; ``""`` without one."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            if begin <= address < end:
                return line.split()[1]
    return ""
