"""``shared-rpc top``: a live view of a server, or one printed frame of it."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shared_rpc.cli.options import BasePath, Socket
from shared_rpc.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from shared_rpc import Client

#: The orders of :data:`shared_rpc.cli.top.tables.ORDERS`.
Order = Literal["size", "age", "leases", "name", "access"]
#: Width of a line without the limit of a terminal.
_UNLIMITED = 10_000


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

    Waits until a server is alive, and for the next one if it exits; with --once this is exit code 1.

    The live view needs the extra 'top', --once does not. Exit code 0 on 'q', 128 plus the number on a signal.
    """
    from rich.console import Console

    from shared_rpc.cli.discovery import find_server

    find = functools.partial(find_server, socket, base_path)
    console = Console(highlight=False)
    if once or not sys.stdout.isatty() or not console.is_terminal or console.is_dumb_terminal:
        _print_once(find, interval, sort, console)
        return
    try:
        from shared_rpc.cli.top.app import run
    except ImportError as error:
        raise ConfigurationError(
            "the live view needs the package textual: pip install 'shared-rpc[top]'; "
            "'shared-rpc top --once' prints the same without it"
        ) from error
    code = run(find, interval, sort, console)
    if code:
        raise typer.Exit(code)


def _print_once(find: Callable[[str], Client], interval: float, sort: str, console: Console) -> None:
    """Print the second of two snapshots: rates need two."""
    from shared_rpc.cli.top.tables import ObjectChoice, View, arranged, headline, objects, others, parts_for, totals
    from shared_rpc.cli.top.watching import ServerWatcher, rates

    watcher = ServerWatcher(find)
    try:
        first = watcher.poll()
        time.sleep(interval)
        second = watcher.poll()
    finally:
        watcher.close()
    view = View(second, rates(first, second), parts_for(console), os.getpid())
    listed = objects(view, arranged(second.objects, ObjectChoice(sort)))
    if not sys.stdout.isatty():  # a program that reads a pipe gets one line for each row, however long
        console.width = _UNLIMITED
    for line in (headline(view), totals(view)):
        console.print(line, no_wrap=True, overflow="ellipsis")
    for table in (*others(view).values(), listed):
        if table.rows or table is listed:
            console.print()
            console.print(table.laid_out(console.width))
