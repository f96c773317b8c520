"""The run that an endpoint is in: its progress, its cancellation, its request.

``progress``, ``cancelled``, ``raise_if_cancelled`` and ``request_id`` may be called anywhere: where no endpoint runs, or no
caller asked, they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import msgspec

from shared_rpc.errors import TaskCancelled, sendable
from shared_rpc.protocol.tasks import Progress

__all__ = ["CALLED_BY", "CURRENT_RUN", "RunContext", "cancelled", "progress", "progress_of", "raise_if_cancelled", "request_id"]


class RunContext(msgspec.Struct, eq=False):
    """One run of an endpoint, as the endpoint sees it. Thread-safe.

    :param chain: names and keys of the calls it serves, to recognise a call that would wait for itself.
    :param report: takes progress, from whichever thread.
    :param request_id: of the call that it was started for.
    """

    chain: frozenset[str]
    report: Callable[[Progress], None]
    request_id: str = ""
    #: Whether the run was asked to stop.
    cancelled: bool = False


#: The run of the endpoint that this thread or coroutine executes.
CURRENT_RUN: ContextVar[RunContext | None] = ContextVar("run", default=None)
#: For a call by an endpoint through the broker of its own process: the run's chain.
CALLED_BY: ContextVar[frozenset[str]] = ContextVar("called by", default=frozenset())


def progress(done: float, total: float | None = None, message: str = "") -> None:
    """Report to all waiters of this endpoint's task how far it is.

    It is cheap enough for every step of a loop: of more than 20 reports a second some are left out, and the last one never.

    :param done: the amount that is done, in units of your choice.
    :param total: the whole amount, None where it is not known.
    :param message: a text for people.
    """
    run = CURRENT_RUN.get()
    if run is not None:
        run.report(progress_of(done, total, str(message)))


#: Characters of a progress message.
_SHOWN = 1000


def progress_of(done: float, total: float | None, message: str) -> Progress:
    """Return a report that can be sent."""
    # A message may have the name of a file, which need not be valid UTF-8.
    return Progress(float(done), None if total is None else float(total), sendable(message[:_SHOWN]))


def request_id() -> str:
    """Return the id of the call that this endpoint runs for, by which the server's log and the caller's error name it.

    It is empty where no endpoint runs, and that of the first call where several joined the run.
    """
    run = CURRENT_RUN.get()
    return run.request_id if run is not None else ""


def cancelled() -> bool:
    """Return whether this endpoint's task is to stop. An endpoint that takes long should ask, and end early."""
    run = CURRENT_RUN.get()
    return run is not None and run.cancelled


def raise_if_cancelled() -> None:
    """End the endpoint here if its task is to stop.

    :raises TaskCancelled: then; do not catch it.
    """
    if cancelled():
        raise TaskCancelled
