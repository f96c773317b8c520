"""Progress reports from an endpoint's thread to the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shared_rpc.forks import fork_safe_lock
from shared_rpc.protocol.tasks import Progress

#: Seconds between two reports of a run.
_PERIOD = 0.05
#: Shared by all reporters: it is held for less than a microsecond, and creating a lock takes as long.
_lock = fork_safe_lock()


class Reporter(msgspec.Struct, eq=False):
    """Forwards reports from any thread to the loop: the latest one of each period, and the last one.

    :param report: called on the loop.
    """

    _loop: asyncio.AbstractEventLoop
    _send: Callable[[Progress], None]
    #: The report that was not sent yet, if any.
    _latest: Progress | None = None
    #: True while a call of :meth:`_flush` is pending.
    _scheduled: bool = False
    _timer: asyncio.TimerHandle | None = None
    _closed: bool = False

    def put(self, progress: Progress) -> None:
        """Report, from any thread. Ignored after the end of the run or of the loop."""
        with _lock:
            if self._closed:
                return
            self._latest = progress
            if self._scheduled:
                return
            self._scheduled = True
        with suppress(RuntimeError):  # the loop is closed: the server stopped during the run
            self._loop.call_soon_threadsafe(self._flush)

    def close(self) -> None:
        """Send any deferred report at the end of the run. On the loop."""
        with _lock:
            self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._flush()

    def _flush(self) -> None:
        with _lock:
            latest, self._latest = self._latest, None
            self._scheduled = latest is not None
        if latest is not None:
            self._send(latest)
            if not self._closed:
                self._timer = self._loop.call_later(_PERIOD, self._flush)
