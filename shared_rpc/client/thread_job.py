"""Jobs in threads whose end is waited for, though the caller is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread


class ShieldedThreadJob:
    """A function that a thread is to run, once.

    asyncio's own cancellation leaves the thread to itself, which then uses memory that its caller believes free.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._begun = self._withdrawn = False
        self._ended = threading.Event()
        # Not the return value of run(): an idle worker thread of anyio keeps its last one.
        self._result: list[Any] = []

    def run(self) -> None:
        """Call the function, in the thread, unless it was withdrawn."""
        with self._lock:
            if self._withdrawn:
                return
            self._begun = True
        try:
            self._result.append(self._function())
        finally:
            self._ended.set()

    async def stop(self) -> bool:
        """Withdraw the function, or wait for its end, however often that is cancelled; return whether there is a result."""
        with self._lock:
            self._withdrawn = True
        while self._begun and not self._ended.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    # A limiter of its own: the function may need another thread.
                    await anyio.to_thread.run_sync(self._ended.wait, limiter=anyio.CapacityLimiter(1))
            except anyio.get_cancelled_exc_class():
                continue
        return bool(self._result)

    def result(self) -> Any:
        """Return the function's result, once."""
        return self._result.pop()
