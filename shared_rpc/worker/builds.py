"""What hooks of the app see: runs that begin in this worker and end here."""

from __future__ import annotations

import time

from shared_rpc.observability.events import HOOKS, BuildFinished, BuildStarted
from shared_rpc.server.executor import Invocation

__all__ = ["Builds"]


class Builds:
    """Runs that have begun while somebody listened, by number. On the worker's loop only."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Invocation, float]] = {}

    def begin(self, number: int, invocation: Invocation) -> None:
        """A run has a thread."""
        if HOOKS.registered:
            self._begun[number] = invocation, time.monotonic()
            HOOKS.emit(BuildStarted(endpoint=invocation.spec.name, request_id=invocation.request_id, cached=invocation.cached))

    def end(self, number: int, error: str = "") -> None:
        """The broker has been told how a run ended. One that nobody heard begin is not heard to end."""
        if number in self._begun:
            invocation, began = self._begun.pop(number)
            HOOKS.emit(
                BuildFinished(
                    endpoint=invocation.spec.name,
                    request_id=invocation.request_id,
                    cached=invocation.cached,
                    seconds=time.monotonic() - began,
                    error=error,
                )
            )
