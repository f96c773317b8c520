"""Ctrl-C, SIGTERM and a closed terminal end a verification at any moment, and leave nothing behind.

A signal's handler raises in the middle of whatever runs. Two things must not be cut in half: starting a process and noting
that it was started, and the clearing up. They run :meth:`Interrupts.held`, and the signal is seen to after them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked for the end. No check takes it for its own failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """Handles the signals of this process while the block runs, in the main thread."""

    def __init__(self) -> None:
        #: The first signal that came, 0 before it.
        self.number = 0
        self._depth = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            # What is ignored stays ignored: nohup, and jobs that a shell runs in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # what signal() had returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The first one is enough: another one must not break off the clearing up that this one has begun.
        if not self.number:
            self.number = number
            self.check()

    def check(self) -> None:
        """Raise if a signal has come: one that came while a finaliser ran was raised where nobody could catch it.

        :raises Interrupted: unless it is held back.
        """
        if self.number and not self._depth:
            raise Interrupted(self.number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise after the block what comes within it, unless the block ends with an exception of its own."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self.check()
