"""Processes that zygotes fork, their parents and their ends."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["ForkedProcess", "adopting", "die_with_parent", "has_ended", "pss_of"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class ForkedProcess:
    """A child that a zygote forked, with what a broker needs of :class:`subprocess.Popen`.

    :param stderr: the reading end of a pipe.
    """

    def __init__(self, pid: int, stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stderr = stderr
        #: As in :class:`subprocess.Popen`; None until it was waited for.
        self.returncode: int | None = None

    def kill(self) -> None:
        """Send SIGKILL, if it was not waited for: until then no other process can have its id."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        :raises subprocess.TimeoutExpired: if it has not ended within so many seconds.
        """
        if self.returncode is None:
            if timeout is not None and not self._ended(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # other code has waited for all children: as Popen does
                self.returncode = 0
        return self.returncode

    def _ended(self, seconds: float) -> bool:
        pidfd = os.pidfd_open(self.pid)
        try:
            return has_ended(pidfd, seconds)
        finally:
            os.close(pidfd)


def has_ended(pidfd: int, seconds: float | None = None) -> bool:
    """Wait for the end of a process, for so many seconds or for ever; return whether it has ended."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(seconds * 1000 if seconds is not None else None))


def pss_of(pid: int | str = "self") -> int:
    """Return a process's memory in bytes, with its share of memory common with its forks; 0 if it has ended. See proc(5)."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


@contextmanager
def adopting() -> Iterator[None]:
    """Have this process become the parent of processes below it whose parent ends meanwhile; see prctl(2).

    Not for longer than needed: a process that adopts another must wait for its end.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot become a subreaper (PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL when the thread that is the parent of this process ends; see prctl(2).

    :param parent: the process id of the parent; if it has ended meanwhile, so does this process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
