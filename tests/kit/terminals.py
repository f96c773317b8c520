"""Commands on a real terminal: a pseudo-terminal, and an emulator of its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pyte

from tests.kit.forks import start
from tests.kit.processes import PYTHONPATH, eventually

#: The sequences by which full-screen programs enter and leave a screen of their own.
ALTERNATE, NORMAL = b"\x1b[?1049h", b"\x1b[?1049l"
HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"

#: Makes the terminal control this process, so that Ctrl-C there reaches it, and runs the module or executes the command.
_TAKE_TERMINAL = """
import fcntl, os, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if sys.argv[2] != "-m":
    os.execv(sys.argv[1], sys.argv[1:])
del sys.argv[:3]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Tty:
    """A command at a terminal of its own, which it controls; the emulator reads all output."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 100,
        lines: int = 30,
        environ: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.written = b""
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._ours, theirs = pty.openpty()
        self.device = os.ttyname(theirs)
        self.resize(columns, lines)
        self.before = termios.tcgetattr(theirs)
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = start(
            [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            start_new_session=True,
            env={**inherited, "PYTHONPATH": PYTHONPATH, "TERM": "xterm-256color", **(environ or {})},
        )
        # Kept open to query the final settings of the terminal.
        self._theirs: int | None = theirs
        self._left: list[Any] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int, lines: int) -> None:
        """Resize the window; the kernel sends SIGWINCH."""
        with self._lock:
            self._screen.resize(lines, columns)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._ours, keys.encode())

    @property
    def lines(self) -> list[str]:
        """The lines of the screen, without trailing blanks."""
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """The text of the screen."""
        return "\n".join(self.lines)

    @property
    def attributes(self) -> list[Any]:
        """The terminal's settings now, or at the end of the command."""
        return self._left if self._theirs is None else termios.tcgetattr(self._theirs)

    def until(self, *texts: str, seconds: float = 20.0) -> str:
        """Wait until the screen shows all these texts; return the screen. Line breaks depend on the length of a path."""

        def shown() -> bool:
            text = self.text
            return all(wanted in text or wanted in " ".join(text.split()) for wanted in texts)

        try:
            eventually(shown, seconds)
        except AssertionError:
            raise AssertionError(f"not all of {texts} were shown, but:\n{self.text}") from None
        return self.text

    def until_gone(self, text: str) -> None:
        """Wait until the screen no longer shows a text."""
        eventually(lambda: text not in self.text, 20.0, f"{text} is shown no more")

    def end(self) -> int:
        """Wait for the command's end and for all its output; return the exit code."""
        code = self.process.wait(20)
        self._hang_up()
        return code

    @property
    def restored(self) -> bool:
        """Return whether a full-screen program has left its screen, shown the cursor, and restored the terminal's settings."""
        written = self.written
        left = written.rfind(ALTERNATE) < written.rfind(NORMAL) and written.rfind(HIDDEN) < written.rfind(SHOWN)
        return left and self.attributes == self.before

    def kill(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Hang up, and end remaining processes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._hang_up()
        os.close(self._ours)

    def _hang_up(self) -> None:
        """Close the other end: when it has no holder, reading fails after all output was read."""
        if self._theirs is not None:
            self._left = termios.tcgetattr(self._theirs)
            os.close(self._theirs)
            self._theirs = None
            self._reader.join(10)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # the other end has no holder
                return
            if not data:
                return
            with self._lock:
                self.written += data
                self._stream.feed(data)
