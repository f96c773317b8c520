"""``shared-rpc run``, and the table of zygotes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shared_rpc.cli.rendering import size, table
from shared_rpc.scripts.options import IDLE_EXIT, MODULE, PRELOAD, Script


def run(
    words: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="A script, a directory or an archive; with -m a module.")
    ],
    module: Annotated[bool, typer.Option(MODULE, help="Run a module, as 'python -m' does.")] = False,
    preload: Annotated[
        list[str] | None,
        typer.Option(PRELOAD, metavar="NAME", help="Import this installed package beforehand too; may be repeated."),
    ] = None,
    idle_exit: Annotated[
        float | None,
        typer.Option(
            IDLE_EXIT,
            metavar="SECONDS",
            min=0,
            help="Lifetime of that process without another script; 1800 by default.",
        ),
    ] = None,
) -> None:
    """Run a script as python does, without the time that importing torch takes.

    Options stand before the script; the words after its name are its arguments. The exit code is the script's, and so is the
    signal that ended it.

    The script is a fork of a process that has imported torch, numpy and this library already. The first script starts it,
    'shared-rpc ls' lists it, and 'shared-rpc stop --all' ends it. Where a fork could not be what 'python script.py' is, python
    itself is started, and a line on standard error says why.
    """
    from shared_rpc.scripts.command import launch

    launch(Script(words[0], tuple(words[1:]), module, tuple(preload or ()), idle_exit))


def zygote_table(zygotes: list[dict[str, Any]], title: str) -> None:
    """Print a row for each zygote."""
    table(
        title,
        ["zygote", "pid>", "has imported", "scripts>", "memory>", "idle>", "ends after>"],
        [
            (
                one["key"],
                one["pid"],
                ", ".join(one["preload"]),
                one["runs"],
                size(one["pss"]),
                f"{one['idle']:.0f} s",
                f"{one['idle_exit']:.0f} s",
            )
            for one in zygotes
        ],
    )
