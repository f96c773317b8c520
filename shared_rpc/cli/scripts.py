"""``shared-rpc run``, and the table of zygotes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shared_rpc.cli.rendering import listing, size


def run(
    words: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="A script, a directory or an archive; with -m a module.")
    ],
    module: Annotated[bool, typer.Option("-m", help="Run a module, as 'python -m' does.")] = False,
    preload: Annotated[
        list[str] | None,
        typer.Option("--preload", metavar="NAME", help="Import this installed package in the zygote; may be repeated."),
    ] = None,
    idle_exit: Annotated[
        float | None,
        typer.Option(
            "--idle-exit",
            metavar="SECONDS",
            min=0,
            help="Lifetime of the zygote without another script; 1800 by default.",
        ),
    ] = None,
) -> None:
    """Run a script as python does, without the time to import torch.

    Options precede the script; what follows it are its arguments. The exit code, or the signal that ended it, is the script's.

    The script is a fork of a process, the zygote, that has imported torch, numpy and this library. The first script starts the
    zygote, 'shared-rpc ls' lists it, and 'shared-rpc stop --all' ends it. If a fork would not behave like 'python script.py',
    python itself runs the script, and a line on standard error gives the reason.
    """
    from shared_rpc.scripts.command import Script, launch

    launch(Script(words[0], tuple(words[1:]), module, tuple(preload or ()), idle_exit))


def zygote_table(zygotes: list[dict[str, Any]], title: str) -> None:
    """Print a row for each zygote."""
    listing(
        title,
        zygotes,
        {
            "zygote": lambda one: one["key"],
            "pid>": lambda one: one["pid"],
            "has imported": lambda one: ", ".join(one["preload"]),
            "scripts>": lambda one: one["runs"],
            "memory>": lambda one: size(one["pss"]),
            "idle>": lambda one: f"{one['idle']:.0f} s",
            "ends after>": lambda one: f"{one['idle_exit']:.0f} s",
        },
    )
