"""The command line of this process, as other programs see it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ROOM", "set_title"]

#: The last word in the command line of a process that changes it: a new command line has only the memory of the old one.
ROOM = "x" * 2000


def set_title(words: Sequence[str]) -> None:
    """Overwrite the words that this process was started with, as far as there is room; see proc_pid_cmdline(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    room = end - start
    if room < 2:
        return
    title = b" ".join(map(os.fsencode, words))[: room - 2]
    # A last byte other than zero makes the kernel treat this as one text, up to the first zero; see setproctitle(3).
    ctypes.memmove(start, title.ljust(room - 1, b"\0") + b".", room)
