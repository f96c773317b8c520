"""The command line. Commands that only talk to a server load no torch."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        # A person waits for the script: what reads and explains all other commands is not loaded for it.
        from shared_rpc.scripts.command import run_directly

        run_directly(sys.argv[2:])
    from shared_rpc.cli.app import main as commands

    commands()
