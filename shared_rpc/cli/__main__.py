"""``shared-rpc``, and ``python -m shared_rpc.cli``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        # The user waits for the script: the other commands and their parser are not loaded for it.
        from shared_rpc.scripts.command import launch, parse

        if (script := parse(sys.argv[2:])) is not None:
            launch(script)
    _open_standard_streams()
    if sys.argv[1:] in (["ls"], ["ls", "--json"]):
        from shared_rpc.cli.listing import command_line, print_servers

        with command_line():
            print_servers(None, json="--json" in sys.argv)
        return
    from shared_rpc.cli.app import main as commands

    commands()


def _open_standard_streams() -> None:
    """Open ``/dev/null`` in place of closed standard streams, as after ``>&-``. Otherwise files opened later would get their
    numbers, and receive this process's output, or that of a program executed in it.
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
