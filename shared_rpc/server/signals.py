"""Serving until somebody asks for the end."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from shared_rpc.errors import ConfigurationError

__all__ = ["End", "wait_for_signal"]


class End:
    """What somebody asks for who wants a process to end, and the main thread waits for.

    No :class:`threading.Event`: that is locked for a moment by who waits for it and by who sets it, and the handler of a signal
    that comes in such a moment, in the same thread, would wait for ever.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Ask for it: from any thread, and in the handler of a signal, whatever that interrupts."""
        self._asked.put(None)

    def wait(self) -> None:
        """Return when somebody has asked for it."""
        while True:
            # An untimed wait may hold back the handler on some systems; the period costs nothing.
            with suppress(queue.Empty):
                return self._asked.get(timeout=3600)


def wait_for_signal(
    begin: Callable[[], object],
    on_hangup: Callable[[], None] | None = None,
    asked: End | None = None,
    give_up: Callable[[], object] | None = None,
    end: Callable[[], object] | None = None,
) -> None:
    """Return when this process gets SIGINT or SIGTERM. In the main thread only.

    :param on_hangup: called in a thread of its own for every SIGHUP; by default that ends the process.
    :param asked: ends the wait too, when another thread asks for it.
    :param give_up: called with SIGINT and SIGTERM; for a ``begin`` that takes long, to have it end early. It must not wait.
    :param begin: called first, when a signal ends the wait and no longer the process: what it starts can be stopped from
        its first moment on. If it returns None, there is nothing to wait for.
    :param end: called when the wait is over, or ``begin`` has failed, while another signal still does nothing: who presses
        Ctrl-C twice does not interrupt the end.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("start(blocking=True) waits for signals, so it must be called in the main thread")
    ended = asked or End()

    def ask(*_: object) -> None:
        ended.set()
        if give_up is not None:
            give_up()

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), ask)
    if on_hangup is not None:
        handlers[signal.SIGHUP] = lambda *_: threading.Thread(target=on_hangup, daemon=True).start()
    with _handlers(handlers):
        try:
            if begin() is not None:
                ended.wait()
        finally:
            if end is not None:
                end()


#: What handlers of ours stand in place of, until they are taken back.
_earlier: dict[int, Any] = {}


@contextmanager
def _handlers(handlers: Mapping[int, Any]) -> Iterator[None]:
    try:
        for number, handler in handlers.items():
            _earlier[number] = signal.getsignal(number)
            signal.signal(number, handler)
        yield
    finally:
        _take_back()


def _take_back() -> None:
    for number in tuple(_earlier):
        signal.signal(number, _earlier.pop(number))


# A child that an endpoint forks waits for nothing here: SIGTERM, as from the pools of multiprocessing, and Ctrl-C end it.
os.register_at_fork(after_in_child=_take_back)
