"""Serving until somebody asks for the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shared_rpc.errors import ConfigurationError

__all__ = ["wait_for_signal"]


def wait_for_signal(
    begin: Callable[[], object],
    on_hangup: Callable[[], None] | None = None,
    asked: threading.Event | None = None,
    give_up: Callable[[], object] | None = None,
) -> None:
    """Return when this process gets SIGINT or SIGTERM. In the main thread only.

    :param on_hangup: called in a thread of its own for every SIGHUP; by default that ends the process.
    :param asked: ends the wait too, when another thread sets it.
    :param give_up: called with SIGINT and SIGTERM; for a ``begin`` that takes long, to have it end early. It must not wait.
    :param begin: called first, when a signal ends the wait and no longer the process: what it starts can be stopped from
        its first moment on. If it returns None, there is nothing to wait for.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("start(blocking=True) waits for signals, so it must be called in the main thread")
    ended = asked or threading.Event()
    asking = False

    def ask(*_: object) -> None:
        nonlocal asking
        # A handler may interrupt itself, as timeout(1) and an impatient Ctrl-C have it: an event that is being set then is
        # locked, by this very thread.
        if asking:
            return
        asking = True
        ended.set()
        if give_up is not None:
            give_up()

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), ask)
    if on_hangup is not None:
        handlers[signal.SIGHUP] = lambda *_: threading.Thread(target=on_hangup, daemon=True).start()
    with _handlers(handlers):
        if begin() is None:
            return
        # An untimed wait may hold back the handler on some systems; the period costs nothing.
        while not ended.wait(3600):
            continue


@contextmanager
def _handlers(handlers: Mapping[int, Any]) -> Iterator[None]:
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
