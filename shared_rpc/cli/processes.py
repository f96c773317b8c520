"""Command lines of processes, as far as this user may read them."""

from __future__ import annotations

import os
from pathlib import Path


def command_of(pid: int, *, folder: bool = True) -> str:
    """Return the command line of a process in one line; ``""`` if it cannot be read.

    A process that is about to end, or is the kernel's, has a name only: ``"[name]"``.

    :param folder: whether to include the program's directory.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if not any(words):
            return f"[{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()}]"
    except OSError:
        return ""
    program, *arguments = (os.fsdecode(word) for word in words)
    return " ".join([program if folder else os.path.basename(program), *arguments]).strip()
