"""The run of the current endpoint: its progress, its cancellation, its request.

``progress``, ``cancelled``, ``raise_if_cancelled`` and ``request_id`` may be called anywhere: outside of endpoints, and for
runs without a waiting caller, they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from shared_rpc.errors import TaskCancelled, sendable
from shared_rpc.protocol.tasks import Progress


class RunContext(msgspec.Struct, eq=False):
    """One run of an endpoint, as used by the endpoint. Thread-safe.

    :param chain: names and keys of the calls that it serves, to detect a call that would wait for itself.
    :param report: receives progress, from any thread.
    :param request_id: the id of the call that started it.
    """

    chain: frozenset[str]
    report: Callable[[Progress], None]
    request_id: str = ""
    #: True if the run was asked to stop.
    cancelled: bool = False


#: The run of the endpoint that this thread or coroutine executes.
CURRENT_RUN: ContextVar[RunContext | None] = ContextVar("run", default=None)


def progress(done: float, total: float | None = None, message: str = "") -> None:
    """Report the progress of this endpoint's task to all its waiters.

    Cheap enough for every step of a loop: above 20 reports a second some are dropped, but never the last one.

    :param done: the completed amount, in units of your choice.
    :param total: the whole amount, None if unknown.
    :param message: a text for display.
    """
    run = CURRENT_RUN.get()
    if run is not None:
        run.report(progress_of(done, total, str(message)))


#: Maximum characters of a progress message.
_SHOWN = 1000


def progress_of(done: float, total: float | None, message: str) -> Progress:
    """Return a report that can be sent."""
    # A message may contain the name of a file, which need not be valid UTF-8.
    return Progress(float(done), None if total is None else float(total), sendable(message[:_SHOWN]))


def request_id() -> str:
    """Return the id of the call that this endpoint runs for, which the server's log and the caller's error contain.

    It is empty outside of endpoints, and that of the first call if several joined the run.
    """
    run = CURRENT_RUN.get()
    return run.request_id if run is not None else ""


def cancelled() -> bool:
    """Return True if this endpoint's task must stop. A long-running endpoint should poll this, and end early."""
    run = CURRENT_RUN.get()
    return run is not None and run.cancelled


def raise_if_cancelled() -> None:
    """End the endpoint here if its task must stop.

    :raises TaskCancelled: in that case; do not catch it.
    """
    if cancelled():
        raise TaskCancelled
