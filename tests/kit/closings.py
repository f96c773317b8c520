"""Closings of memory by another thread that are delayed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared_rpc.memory.closing import CLOSER


@contextmanager
def late_closings() -> Iterator[threading.Event]:
    """Block this process's closing thread until the event is set; it is set at the end."""
    begun, free = threading.Event(), threading.Event()
    CLOSER.notify(lambda: (begun.set(), free.wait(30)))
    begun.wait(30)
    try:
        yield free
    finally:
        free.set()
        CLOSER.wait()
