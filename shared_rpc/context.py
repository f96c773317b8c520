"""What an endpoint can say of itself, and ask, while it runs.

``progress``, ``cancelled``, ``raise_if_cancelled`` and ``request_id`` may be called anywhere: where no endpoint runs, or nobody
asked, they do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shared_rpc.errors import TaskCancelled, sendable
from shared_rpc.protocol.tasks import Progress

__all__ = ["CALLED_BY", "CURRENT_RUN", "Run", "cancelled", "forward_tqdm", "progress", "raise_if_cancelled", "request_id"]


class Run:
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
CURRENT_RUN: ContextVar[Run | None] = ContextVar("run", default=None)
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
        run.report(_progress(done, total, str(message)))


#: Characters of a message.
_SHOWN = 1000


def _progress(done: float, total: float | None, message: str) -> Progress:
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


@contextmanager
def forward_tqdm() -> Iterator[None]:
    """Report the progress bars of tqdm that are made in this block, in an endpoint, as its progress.

    Hugging Face's bar for loading checkpoints is one of them. A bar that is disabled says nothing here either, and one in
    another does not hide the outer one for longer than it lives. tqdm must be installed.
    """
    from tqdm.std import tqdm

    run = CURRENT_RUN.get()
    if run is None:
        yield
        return
    _hook(tqdm)
    token = _forwarding.set(run)
    try:
        yield
    finally:
        _forwarding.reset(token)


_forwarding: ContextVar[Run | None] = ContextVar("forwarding", default=None)
_hooking = threading.Lock()
#: The attribute by which a bar, updated from whichever thread, knows its run.
_MARK = "_shared_rpc_run"


def _hook(bar: Any) -> None:
    """Have tqdm's bars tell of themselves: a library that makes them has its class by name already."""
    with _hooking:
        if hasattr(bar, _MARK):
            return
        setattr(bar, _MARK, None)
        made, updated, closed = bar.__init__, bar.update, bar.close

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            setattr(self, _MARK, _forwarding.get())
            _tell(self)

        def update(self: Any, n: float | None = 1) -> Any:
            result = updated(self, n)
            _tell(self)
            return result

        def close(self: Any) -> None:
            _tell(self)
            closed(self)

        bar.__init__, bar.update, bar.close = __init__, update, close


def _tell(bar: Any) -> None:
    run = getattr(bar, _MARK, None)
    if run is not None and not bar.disable:
        run.report(_progress(bar.n, bar.total, str(bar.desc or "").rstrip(": ")))
