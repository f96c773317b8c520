"""Subscriptions to refreshes, whose callbacks run in their own thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.steps import Request, message_of
from shared_rpc.errors import ConnectionClosed, SharedRPCError
from shared_rpc.protocol import generations as g
from shared_rpc.protocol.generations import Generation

_log = logging.getLogger("shared_rpc")

_ENDED = "the subscription ended"


class Subscription:
    """A callback of ``on_refresh``, until :meth:`close`, or the end of a ``with`` block."""

    def __init__(self, subscriptions: Subscriptions, callback: Callable[[Generation], object]) -> None:
        self._subscriptions = subscriptions
        self._callback = callback
        #: True while the callback may be called; False also when the connection to the server has ended.
        self.active = True

    def close(self) -> None:
        """End the calls of the callback; an active call completes. Idempotent."""
        self._subscriptions.end(self)

    def notify(self, generation: Generation) -> None:
        """Call the callback. Its exceptions are only logged."""
        if self.active:
            try:
                self._callback(generation)
            except Exception:
                _log.exception("a callback of on_refresh failed for generation %d of %s", *_named(generation))

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(generation: Generation) -> tuple[int, str]:
    return generation.generation, generation.cache_key


class Subscriptions:
    """All subscriptions of one client. While there are any, a daemon thread calls their callbacks one after the other.

    :param connect: returns a link for the first subscription: on the client's own, a thread would read for all others during an
        endless wait. None when the client has been collected.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        #: None without subscriptions.
        self._link: Any = None
        self._closed = False

    def subscribe(self, callback: Callable[[Generation], object]) -> Subscription:
        """Call a callback with each generation that becomes current from now on.

        :raises SharedRPCError: if the server cannot be reached, or the subscriptions were closed meanwhile.
        """
        subscription = Subscription(self, callback)
        # Not in the lock: close() must not wait for a server.
        link = self._connect() if self._link is None else None
        try:
            after = _news(link, -1).after if link is not None else 0
            with self._lock:
                if self._closed:
                    raise ConnectionClosed("this client is closed")
                if self._link is None:
                    if link is None:
                        raise ConnectionClosed("the connection ended, or this client was collected: subscribe again")
                    thread = threading.Thread(target=self._run, args=(link, after), name="shared-rpc-refreshes", daemon=True)
                    self._link, link = link, None
                    thread.start()
                self._subscriptions.append(subscription)
        finally:
            if link is not None:
                link.close(_ENDED)
        return subscription

    def end(self, subscription: Subscription) -> None:
        """End one subscription; the thread ends with the last one."""
        with self._lock:
            subscription.active = False
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
            link = self._link
            if link is None or self._subscriptions:
                return
            self._link = None
        link.close(_ENDED)

    def close(self) -> None:
        """End all subscriptions, including those being created."""
        with self._lock:
            self._closed = True
        for subscription in tuple(self._subscriptions):
            self.end(subscription)

    def _run(self, link: Any, after: int) -> None:
        try:
            while True:
                news = _news(link, after)
                after = news.after
                for generation in news.generations:
                    for subscription in tuple(self._subscriptions):
                        subscription.notify(generation)
        except SharedRPCError as error:
            self._lost(link, error)
        finally:
            link.close(_ENDED)

    def _lost(self, link: Any, error: SharedRPCError) -> None:
        with self._lock:
            if self._link is not link:  # all subscriptions have ended, or new ones have begun
                return
            self._link = None
            ended, self._subscriptions = self._subscriptions, []
        _log.warning(
            "%d callbacks of on_refresh are not called any more, because the connection ended: %s. Subscribe them again when "
            "the server is back",
            len(ended),
            error,
        )
        for subscription in ended:
            subscription.active = False


def _news(link: Any, after: int) -> g.Refreshes:
    """Wait for generations after a position; -1 asks for the present position."""
    request = Request(g.AwaitRefreshes(after), "a wait for refreshes")
    deadline = math.inf if after >= 0 else time.monotonic() + PROMPT
    return message_of(link.exchange(request, deadline), request.what, g.Refreshes)
