"""``shared-rpc top``: a live view of a server."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from shared_rpc.cli.options import BasePath, Socket
from shared_rpc.errors import ConfigurationError

__all__ = ["Order", "top"]

#: The orders of :data:`shared_rpc.cli.top.tables.ORDERS`.
Order = Literal["size", "age", "leases", "name", "access"]


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-d", min=0.05, max=86400, metavar="SECONDS", help="Between two polls.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit; the default without a terminal.")] = False,
    sort: Annotated[Order, typer.Option(help="The order of objects.")] = "size",
    socket: Socket = None,
    base_path: BasePath = None,
) -> None:
    """Watch a server: its objects and their holders, calls, builds, memory, workers and clients. '?' shows the keys.

    Waits for a server where none is alive, and for the next one when it goes away. With --once that is exit code 1.

    The live view needs the extra 'top', --once does not. Exit code 0 on 'q', 128 and its number on a signal.
    """
    import functools

    from rich.console import Console

    from shared_rpc.cli.discovery import find_server
    from shared_rpc.cli.top.printing import print_once

    find = functools.partial(find_server, socket, base_path)
    console = Console(highlight=False)
    if once or not sys.stdout.isatty() or not console.is_terminal or console.is_dumb_terminal:
        print_once(find, interval, sort, console)
        return
    try:
        from shared_rpc.cli.top.terminal import run
    except ImportError as error:
        raise ConfigurationError(
            "the live view needs the package textual: pip install 'shared-rpc[top]'; "
            "'shared-rpc top --once' prints the same without it"
        ) from error
    code = run(find, interval, sort, console)
    if code:
        raise typer.Exit(code)
