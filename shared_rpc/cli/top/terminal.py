"""The live view on a terminal: however it ends, the terminal is as it was before."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

from shared_rpc import Client
from shared_rpc.cli.top.app import TopApp
from shared_rpc.cli.top.tables import parts_for
from shared_rpc.cli.top.watching import ServerWatcher

__all__ = ["run"]

#: Signals that end the view. Textual leaves them to their defaults, which leave the terminal as it is at that moment.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_STDOUT = 1


def run(find: Callable[[str], Client], interval: float, sort: str, console: Console) -> int:
    """Show the server until a key or a signal ends it: the exit code."""
    watcher = ServerWatcher(find)
    app = TopApp(watcher, interval, sort, parts_for(console), driver_class=_Terminal)

    async def show() -> None:
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            loop.add_signal_handler(number, app.exit, None, 128 + number)
        await app.run_async()

    try:
        asyncio.run(show())
    finally:
        watcher.close()
    return app.return_code or 0


class _Output:
    """Standard output, unbuffered: a buffer would be written again when the interpreter ends, to a terminal that may be gone.

    :param gone: is called where writing fails.
    """

    def __init__(self, gone: Callable[[], None]) -> None:
        self._gone = gone
        self._encoding = sys.stdout.encoding

    def write(self, text: str) -> None:
        data = text.encode(self._encoding, "replace")
        try:
            while data:
                data = data[os.write(_STDOUT, data) :]
        except OSError:
            self._gone()

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


class _Terminal(LinuxDriver):
    """Textual's driver for what it does not provide for: it draws on standard error, trusts COLUMNS and LINES, reads what is no
    keyboard without a pause, and goes on when the terminal has gone. So Textual 8.2.
    """

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        output: Any = _Output(self._gone)  # with the two methods that the driver calls
        self._file = output

    def _gone(self) -> None:
        # The signal that tells of it may come later, or never: as after nohup.
        self._loop.call_soon_threadsafe(self._app.exit, None, 128 + signal.SIGHUP)

    def _get_terminal_size(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(_STDOUT)
        except OSError:
            columns, lines = 0, 0
        return columns or 80, lines or 24

    def run_input_thread(self) -> None:
        """Read keys where there is a keyboard."""
        if not self.input_tty:
            self.exit_event.wait()
            return
        try:
            super().run_input_thread()
        except OSError:
            self._gone()
