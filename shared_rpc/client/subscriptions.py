"""Subscriptions to refreshes, whose callbacks run in their own thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.link import BlockingLink
from shared_rpc.client.steps import Request, message_of
from shared_rpc.errors import ConnectionClosed, SharedRPCError
from shared_rpc.protocol import generations as g
from shared_rpc.protocol.generations import Generation

_log = logging.getLogger("shared_rpc")


class NewsSource(Protocol):
    """A source of news."""

    def news(self, after: int) -> tuple[list[Generation], int]:
        """Wait for generations after a position; return them and the position after them. -1 asks for the present position.

        :raises SharedRPCError: when no further news will come.
        """

    def close(self) -> None:
        """End the source; a :meth:`news` that waits in another thread raises an error."""


class LinkSource(NewsSource):
    """News from a server, over its own link: on a shared one, a thread would read for all others during an endless wait."""

    def __init__(self, link: BlockingLink) -> None:
        self._link = link

    def news(self, after: int) -> tuple[list[Generation], int]:
        """Wait for news from the server."""
        request = Request(g.AwaitRefreshes(after), "a wait for refreshes")
        deadline = math.inf if after >= 0 else time.monotonic() + PROMPT
        news = message_of(self._link.exchange(request, deadline), request.what, g.Refreshes)
        return news.generations, news.after

    def close(self) -> None:
        """Hang up."""
        self._link.close("the subscription ended")


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _named(generation: Generation) -> tuple[int, str]:
    return generation.generation, generation.cache_key


class Subscriptions:
    """All subscriptions of one client. While there are any, a daemon thread calls their callbacks one after the other.

    :param connect: creates the source for the first subscription; None when the client has been collected.
    """

    def __init__(self, connect: Callable[[], NewsSource | None]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        #: None without subscriptions.
        self._source: NewsSource | None = None
        self._closed = False

    def subscribe(self, callback: Callable[[Generation], object]) -> Subscription:
        """Call a callback with each generation that becomes current from now on.

        :raises SharedRPCError: if the server cannot be reached, or the subscriptions were closed meanwhile.
        """
        subscription = Subscription(self, callback)
        # Not in the lock: close() must not wait for a server.
        source = self._connect() if self._source is None else None
        try:
            after = source.news(-1)[1] if source is not None else 0
            with self._lock:
                if self._closed:
                    raise ConnectionClosed("this client is closed")
                if self._source is None:
                    if source is None:
                        raise ConnectionClosed("the connection ended, or this client was collected: subscribe again")
                    thread = threading.Thread(target=self._run, args=(source, after), name="shared-rpc-refreshes", daemon=True)
                    self._source, source = source, None
                    thread.start()
                self._subscriptions.append(subscription)
        finally:
            if source is not None:
                source.close()
        return subscription

    def end(self, subscription: Subscription) -> None:
        """End one subscription; the thread ends with the last one."""
        with self._lock:
            subscription.active = False
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
            source = self._source
            if source is None or self._subscriptions:
                return
            self._source = None
        source.close()

    def close(self) -> None:
        """End all subscriptions, including those being created."""
        with self._lock:
            self._closed = True
        for subscription in tuple(self._subscriptions):
            self.end(subscription)

    def _run(self, source: NewsSource, after: int) -> None:
        while True:
            try:
                generations, after = source.news(after)
                for generation in generations:
                    for subscription in tuple(self._subscriptions):
                        subscription.notify(generation)
            except SharedRPCError as error:
                source.close()
                self._ended(source, error)
                return
            except BaseException:
                source.close()
                raise

    def _ended(self, source: NewsSource, error: SharedRPCError) -> None:
        with self._lock:
            if self._source is not source:  # all subscriptions have ended, or new ones have begun
                return
            self._source = None
            ended, self._subscriptions = self._subscriptions, []
        _log.warning(
            "%d callbacks of on_refresh are not called any more, because the connection ended: %s. Subscribe them again when "
            "the server is back",
            len(ended),
            error,
        )
        for subscription in ended:
            subscription.active = False
