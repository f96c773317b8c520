"""``shared-rpc top``: a live view of a server, or one printed frame of it."""

from __future__ import annotations

import functools
import sys
import time
from contextlib import closing
from typing import Annotated

import typer

from shared_rpc.cli.options import BasePath, Socket
from shared_rpc.errors import ConfigurationError


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
    from shared_rpc.cli.rendering import table, width
    from shared_rpc.cli.top.tables import OTHERS, arranged, objects, summary
    from shared_rpc.cli.top.watching import ServerWatcher

    console = Console(highlight=False, width=width())
    with closing(ServerWatcher(functools.partial(the_server, socket, base_path, timeout=PATIENCE))) as watcher:
        if once or not sys.stdout.isatty() or not console.is_terminal or console.is_dumb_terminal:
            watcher.poll()
            time.sleep(interval)  # rates need two snapshots
            shot = watcher.poll()
            console.print(summary(shot), no_wrap=True, overflow="ellipsis")
            for columns, rows in (*(make(shot) for make in OTHERS), objects(shot, arranged(shot.objects))):
                if rows:
                    table("", columns, rows)
            return
        try:
            from shared_rpc.cli.top.app import TopApp
        except ImportError as error:
            raise ConfigurationError(
                "the live view needs the package textual: pip install 'shared-rpc[top]'; "
                "'shared-rpc top --once' prints the same without it"
            ) from error
        app = TopApp(watcher, interval)
        app.run()
    if app.return_code:
        raise typer.Exit(app.return_code)
