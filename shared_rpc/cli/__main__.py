"""``shared-rpc``, and ``python -m shared_rpc.cli``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        # A person waits for the script: the other commands are not loaded for it, nor what parses them.
        from shared_rpc.scripts.command import launch, parse

        if (script := parse(sys.argv[2:])) is not None:
            launch(script)
    _open_standard_streams()
    from shared_rpc.cli.app import main as commands

    commands()


def _open_standard_streams() -> None:
    """Open ``/dev/null`` in place of standard streams that are closed, as after ``>&-``. Files that are opened later would else
    have their numbers, and receive what this process, or a program that it becomes, writes to the streams.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            os.set_inheritable(number, True)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(number, mode, errors="backslashreplace", closefd=False))


if __name__ == "__main__":
    main()
