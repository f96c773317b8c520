"""``shared-rpc top``: a live view of a server, or one printed frame of it."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from shared_rpc.cli.options import BasePath, Socket
from shared_rpc.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from shared_rpc import Client


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-d", min=0.05, max=86400, metavar="SECONDS", help="Between two polls.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit; the default without a terminal.")] = False,
    socket: Socket = None,
    base_path: BasePath = None,
) -> None:
    """Watch a server: its objects and their holders, calls, builds, memory, workers and clients. '?' shows the keys.

    Waits until a server is alive, and for the next one if it exits; with --once this is exit code 1.

    The live view needs the extra 'top', --once does not. Exit code 0 on 'q', 128 plus the number on a signal.
    """
    from rich.console import Console

    from shared_rpc.cli.discovery import PATIENCE, the_server
    from shared_rpc.cli.rendering import width

    find = functools.partial(the_server, socket, base_path, timeout=PATIENCE)
    console = Console(highlight=False, width=width())
    if once or not sys.stdout.isatty() or not console.is_terminal or console.is_dumb_terminal:
        _print_once(find, interval, console)
        return
    try:
        from shared_rpc.cli.top.app import run
    except ImportError as error:
        raise ConfigurationError(
            "the live view needs the package textual: pip install 'shared-rpc[top]'; "
            "'shared-rpc top --once' prints the same without it"
        ) from error
    code = run(find, interval)
    if code:
        raise typer.Exit(code)


def _print_once(find: Callable[[str], Client], interval: float, console: Console) -> None:
    """Print the second of two snapshots, because rates need two."""
    from shared_rpc.cli.top.tables import ObjectChoice, arranged, objects, others, summary
    from shared_rpc.cli.top.watching import ServerWatcher

    with closing(ServerWatcher(find)) as watcher:
        watcher.poll()
        time.sleep(interval)
        shot = watcher.poll()
    tables = [*others(shot), objects(shot, arranged(shot.objects, ObjectChoice()))]
    for text in (summary(shot), *(table.lines() for table in tables)):
        console.print(text, end="\n\n", no_wrap=True, overflow="ellipsis")
