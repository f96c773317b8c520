"""A server's standard error, written without blocking, and its children's, which is forwarded with the last lines kept."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from contextlib import suppress
from typing import IO

#: Number of lines kept, and of characters of each.
_LINES, _WIDTH = 40, 500
#: Bytes of one read.
_CHUNK = 1 << 16
#: Seconds for the reader of the broker's own standard error to read some of it.
_READER = 1.0


#: Held from the check for space to the write: no other thread of this process may write in between.
_writing = threading.Lock()


def _write(data: bytes) -> bool:
    """Write as much as fits to standard error, at most PIPE_BUF bytes; return False if nothing fits."""
    with _writing:
        if not _has_space(0):
            return False
        os.write(2, data[: select.PIPE_BUF])
        return True


def _has_space(seconds: float) -> bool:
    ready = select.poll()
    ready.register(2, select.POLLOUT)
    return bool(ready.poll(seconds * 1000))


class LogHandler(logging.Handler):
    """A log on the broker's standard error that drops excess output: the broker's loop must not wait for a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, as far as it fits."""
        try:
            data = f"{self.format(record)}\n".encode(errors="replace")
            while data and _write(data):
                data = data[select.PIPE_BUF :]
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing: there is nowhere to report it."""


class Tail:
    """The output of a child, read in its own thread, so that no slow terminal can block the loop.

    :param passes_on: True to forward the output to this process's standard error.
    """

    def __init__(self, stream: IO[bytes], passes_on: bool = True) -> None:
        self._stream = stream
        self._passes_on = passes_on
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._rest = b""
        #: True if the last write found no space.
        self._stuck = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._pump, name="shared-rpc-stderr", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            stream.close()
            raise

    def _pump(self) -> None:
        with self._stream as stream:
            while data := stream.read(_CHUNK):
                self._remember(data)
                with suppress(OSError):  # the broker's standard error is closed
                    if self._passes_on:
                        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        """Write as much as fits, and drop the rest if the broker's standard error is unread: no worker waits for a terminal."""
        for start in range(0, len(data), select.PIPE_BUF):
            self._stuck = not _has_space(0 if self._stuck else _READER)
            if self._stuck:
                return
            _write(data[start : start + select.PIPE_BUF])

    def _remember(self, data: bytes) -> None:
        with self._lock:
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(line[:_WIDTH].decode(errors="replace") for line in lines[-_LINES:])
            self._rest = self._rest[:_WIDTH]

    @property
    def ended(self) -> bool:
        """True once no process can write to it any more, and all is read."""
        return not self._thread.is_alive()

    def text(self) -> str:
        """Return the last lines."""
        with self._lock:
            return "\n".join([*self._lines, self._rest.decode(errors="replace")]).strip("\n")
