"""Subscriptions to refreshes, each of which calls its callback in a thread of its own."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.steps import Request, message_of
from shared_rpc.errors import SharedRPCError
from shared_rpc.protocol import generations as g
from shared_rpc.protocol.generations import Generation

_log = logging.getLogger("shared_rpc")


class Subscription:
    """A callback of ``on_refresh``, until :meth:`close`, or the end of a ``with`` block.

    :param link: closed with this object. On the client's own, the thread would read for all others during an endless wait.
    """

    def __init__(self, link: Any, callback: Callable[[Generation], object]) -> None:
        self._link = link
        self._callback = callback
        #: True while the callback may be called; False also when the connection to the server has ended.
        self.active = True
        try:
            after = self._news(-1).after
            threading.Thread(target=self._run, args=(after,), name="shared-rpc-refreshes", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the calls of the callback; an active call completes. Idempotent."""
        self.active = False
        self._link.close("the subscription ended")

    def _run(self, after: int) -> None:
        try:
            while self.active:
                news = self._news(after)
                after = news.after
                for generation in news.generations:
                    self._notify(generation)
        except SharedRPCError as error:
            if self.active:
                _log.warning(
                    "a callback of on_refresh is not called any more, because the connection ended: %s. Subscribe again when "
                    "the server is back",
                    error,
                )
        finally:
            self.close()

    def _news(self, after: int) -> g.Refreshes:
        """Wait for generations after a position; -1 asks for the present position."""
        request = Request(g.AwaitRefreshes(after), "a wait for refreshes")
        deadline = math.inf if after >= 0 else time.monotonic() + PROMPT
        return message_of(self._link.exchange(request, deadline), request.what, g.Refreshes)

    def _notify(self, generation: Generation) -> None:
        """Call the callback. Its exceptions are only logged."""
        if self.active:
            try:
                self._callback(generation)
            except Exception:
                made = generation.generation, generation.cache_key
                _log.exception("a callback of on_refresh failed for generation %d of %s", *made)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end_all(subscriptions: Iterable[Subscription]) -> None:
    """End subscriptions, with their client."""
    for subscription in tuple(subscriptions):
        subscription.close()
