"""Progress reports from an endpoint's thread to the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shared_rpc.forks import fork_safe_lock
from shared_rpc.protocol.tasks import Progress

#: Number of reports sent before thinning begins.
_BURST = 100
#: Minimum seconds between two reports from then on; a deferred report is sent after the same time.
_PERIOD = 0.05
#: Shared by all reporters: it is held for less than a microsecond, and creating a lock takes as long.
_lock = fork_safe_lock()


class Reporter(msgspec.Struct, eq=False):
    """Forwards reports from any thread to the loop. Reports in quick succession are thinned out; the last is sent.

    :param report: called on the loop.
    """

    _loop: asyncio.AbstractEventLoop
    _send: Callable[[Progress], None]
    #: Created with the first report: most runs report nothing.
    _waiting: deque[Progress] | None = None
    _scheduled: bool = False
    _allowance: float = float(_BURST)
    _counted: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _closed: bool = False

    def put(self, progress: Progress) -> None:
        """Report, from any thread. Ignored after the end of the run or of the loop."""
        with _lock:
            if self._closed:
                return
            if self._waiting is None:
                self._waiting = deque(maxlen=_BURST)
            self._waiting.append(progress)
            if self._scheduled:
                return
            self._scheduled = True
        with suppress(RuntimeError):  # the loop is closed: the server stopped during the run
            self._loop.call_soon_threadsafe(self._flush)

    def close(self) -> None:
        """Send any deferred report at the end of the run. On the loop."""
        with _lock:
            self._closed = True
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if waiting:
            self._send(waiting[-1])

    def _flush(self) -> None:
        now = self._loop.time()
        self._allowance = min(self._allowance + (now - self._counted) / _PERIOD, float(_BURST))
        self._counted = now
        count = int(self._allowance)
        with _lock:
            if self._waiting is None:  # the run has ended
                return
            # The newest ones: a watcher needs the current progress.
            newest = list(self._waiting)[-count:] if count else []
            if count or not self._waiting:
                self._waiting.clear()
                self._scheduled = False
            else:
                self._timer = self._loop.call_later(_PERIOD, self._flush)
        self._allowance -= len(newest)
        for progress in newest:
            self._send(progress)
