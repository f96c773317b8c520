"""The command line. Commands that only talk to a server load no torch."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        # A person waits for the script: what reads and explains all other commands is not loaded for it.
        from shared_rpc.scripts.command import run_directly

        run_directly(sys.argv[2:])
    _have_standard_streams()
    from shared_rpc.cli.app import main as commands

    commands()


def _have_standard_streams() -> None:
    """Open ``/dev/null`` in place of standard streams that are closed, as after ``>&-``: what is opened next would else have
    their numbers, and get what is written to them, here and in what this process becomes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            os.set_inheritable(number, True)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, errors="backslashreplace", closefd=False))  # noqa: SIM115
