"""The terminal: keys one by one, a screen of its own, signals. However its block ends, the terminal is as it was before."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shared_rpc.cli.top.keys import KeyReader

__all__ = ["Input", "Terminal"]

#: Seconds that a terminal takes at most between the escape character and the rest of a key's sequence.
_ESCAPE = 0.05
#: What ends the view, and what it takes notice of.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_OTHERS = (signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP)
#: Not a signal's number: another thread has news.
_NEWS = 0


class Input(NamedTuple):
    """What has come: keys, and the signal that asks for the end, or None."""

    keys: list[str]
    ended_by: int | None


class Terminal:
    """Standard output, a terminal, and standard input if that is one too.

    ::

        with Terminal(console) as terminal:
            terminal.draw(lines)
            keys, ended_by = terminal.wait()
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._input: int | None = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._output = sys.stdout.fileno()
        self._keys = KeyReader()
        self._live: Live | None = None
        #: Whether nobody is there any more to see anything.
        self._gone = False
        self._saved: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._wakeup, self._waker = -1, -1
        self._former_waker = -1

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines now: those of the terminal itself, whatever the environment says."""
        try:
            columns, lines = os.get_terminal_size(self._output)
        except OSError:
            columns, lines = 0, 0
        return columns or 80, lines or 24

    def wake(self) -> None:
        """Have :meth:`wait` return; from another thread."""
        with suppress(OSError):  # full, so that it will return anyway, or closed
            os.write(self._waker, bytes([_NEWS]))

    def draw(self, lines: Iterable[Text]) -> None:
        """Show these lines, which fit the size."""
        assert self._live is not None, "only in its block"
        self._console.size = self.size
        try:
            self._live.update(Group(*lines), refresh=True)
        except OSError:  # the signal that tells of it may come later
            self._gone = True

    def wait(self) -> Input:
        """Wait for keys, for a signal, for another size, or for :meth:`wake`."""
        if self._gone:
            return Input([], signal.SIGHUP)
        watched = [self._wakeup] + ([self._input] if self._input is not None else [])
        ready, _, _ = select.select(watched, [], [], _ESCAPE if self._keys.undecided else None)
        keys = self._keys.decide() if not ready else []
        if self._input in ready:
            data = self._read()
            if not data:  # the terminal has gone
                return Input([], signal.SIGHUP)
            keys += self._keys.feed(data)
        ended_by = None
        for number in self._told() if self._wakeup in ready else ():
            if number in _ENDING:
                ended_by = number
            elif number == signal.SIGTSTP:
                self._suspend()
            elif number == signal.SIGCONT:  # a shell may have changed the terminal meanwhile
                self._leave_screen()
                self._enter_screen()
        return Input(keys, ended_by)

    def __enter__(self) -> Terminal:
        self._wakeup, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former_waker = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (*_ENDING, *_OTHERS):
            self._handlers[number] = signal.signal(number, _noticed)
        try:
            self._enter_screen()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        try:
            self._leave_screen()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._former_waker)
            os.close(self._wakeup)
            os.close(self._waker)
            self._wakeup = self._waker = -1

    def _enter_screen(self) -> None:
        if self._input is not None:
            self._saved = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._live.start()

    def _leave_screen(self) -> None:
        live, self._live = self._live, None
        saved, self._saved = self._saved, None
        try:
            if live is not None:
                with suppress(OSError):  # nobody is there to see it
                    live.stop()
        finally:
            if saved is not None and self._input is not None:
                # What was typed and not read was meant for this program, not for the shell.
                with suppress(termios.error):
                    termios.tcsetattr(self._input, termios.TCSAFLUSH, saved)

    def _suspend(self) -> None:
        """Ctrl-Z: stop as any program does, with the terminal as it was, and come back."""
        self._leave_screen()
        with _default(signal.SIGTSTP):
            os.kill(os.getpid(), signal.SIGTSTP)
        self._enter_screen()

    def _read(self) -> bytes:
        assert self._input is not None, "there is something to read"
        try:
            return os.read(self._input, 4096)
        except OSError:
            return b""

    def _told(self) -> bytes:
        try:
            return os.read(self._wakeup, 4096)
        except BlockingIOError:
            return b""


@contextmanager
def _default(number: signal.Signals) -> Iterator[None]:
    handler = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, handler)


def _noticed(number: int, frame: FrameType | None) -> None:
    """The interpreter has written its number to the pipe; there is a time and a place to act on it."""
