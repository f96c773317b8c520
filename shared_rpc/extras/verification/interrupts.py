"""Ctrl-C, SIGTERM and a closed terminal end a verification at any moment, and leave nothing behind.

A signal's handler raises in the middle of the code that runs. Two steps must not be interrupted: starting a process and noting
that it was started, and the cleaning up. They run in :meth:`Interrupts.deferred`, which raises at its end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """End by a signal. No check takes it for its own failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """Handler of this process's signals while the block runs, in the main thread."""

    def __init__(self) -> None:
        #: The first signal that came, 0 before it.
        self.number = 0
        self._depth = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            # What is ignored stays ignored: nohup, and jobs that a shell runs in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The first one is enough: another one must not interrupt the cleaning up that it has begun.
        if not self.number:
            self.number = number
            self.check()

    def check(self) -> None:
        """Raise if a signal has come: the exception of one that came during a finaliser is lost.

        :raises Interrupted: unless it is deferred.
        """
        if self.number and not self._depth:
            raise Interrupted(self.number)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise after the block for a signal within it, unless the block ends with an exception of its own."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self.check()
