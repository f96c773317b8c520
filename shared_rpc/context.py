"""What an endpoint can say of itself, and ask, while it runs.

``progress``, ``cancelled``, ``raise_if_cancelled`` and ``request_id`` may be called anywhere: where no endpoint runs, or nobody
asked, they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from shared_rpc.errors import TaskCancelled, sendable
from shared_rpc.protocol.tasks import Progress

__all__ = ["CALLED_BY", "CURRENT_RUN", "RunContext", "cancelled", "progress", "progress_of", "raise_if_cancelled", "request_id"]


class RunContext:
    """One run of an endpoint, as the endpoint sees it. Thread-safe.

    :param chain: names and keys of the calls it serves: they tell a call that would wait for itself.
    :param report: takes progress, from whichever thread.
    :param request_id: of the call that it was started for.
    """

    __slots__ = ("cancelled", "chain", "report", "request_id")

    def __init__(self, chain: frozenset[str], report: Callable[[Progress], None], request_id: str = "") -> None:
        self.chain = chain
        self.report = report
        self.request_id = request_id
        #: Whether it was asked to stop.
        self.cancelled = False


#: The run of the endpoint that this thread, or this coroutine, carries out.
CURRENT_RUN: ContextVar[RunContext | None] = ContextVar("run", default=None)
#: Of a call that an endpoint makes through the broker of its own process: the run's chain.
CALLED_BY: ContextVar[frozenset[str]] = ContextVar("called by", default=frozenset())


def progress(done: float, total: float | None = None, message: str = "") -> None:
    """Tell everybody who waits for this endpoint's task how far it is.

    Cheap enough for every step of a loop: what comes faster than 20 times a second is thinned out, and the last always told.

    :param done: how much is done, in units of your choice.
    :param total: how much there is in all, None where that is not known.
    :param message: what is going on.
    """
    run = CURRENT_RUN.get()
    if run is not None:
        run.report(progress_of(done, total, str(message)))


#: Characters of a message.
_SHOWN = 1000


def progress_of(done: float, total: float | None, message: str) -> Progress:
    """Return a report that can be sent."""
    # A message may be the name of a file, and such names need not be text.
    return Progress(float(done), None if total is None else float(total), sendable(message[:_SHOWN]))


def request_id() -> str:
    """What tells the call that this endpoint runs for from all others: in the server's log, and in its caller's error.

    Empty where no endpoint runs. Of calls that joined the run it is the first one's.
    """
    run = CURRENT_RUN.get()
    return run.request_id if run is not None else ""


def cancelled() -> bool:
    """Whether somebody asked this endpoint's task to stop. An endpoint that takes long should look, and end early."""
    run = CURRENT_RUN.get()
    return run is not None and run.cancelled


def raise_if_cancelled() -> None:
    """End the endpoint here if somebody asked its task to stop.

    :raises TaskCancelled: then; let it pass.
    """
    if cancelled():
        raise TaskCancelled
