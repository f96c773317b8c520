"""Waiting in a server: the waiters for outcomes, and the coroutines of pending work. Leaving cancels the coroutine."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Literal

import msgspec

from shared_rpc.errors import ConnectionClosed
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import Run
from shared_rpc.memory.records import Record
from shared_rpc.server.observing import Observed
from shared_rpc.server.state.leases import TaskHolder
from shared_rpc.server.state.objects import StoredObject

_log = logging.getLogger("shared_rpc.server")


class Delivery(msgspec.Struct):
    """The outcome of a call for one waiter. The record is borrowed while the delivery is handled.

    ``stored`` is the object if the server keeps it; with ``managed`` the waiter's session now holds a lease on it.
    """

    record: Record | None
    live: Any
    stored: StoredObject | None
    managed: bool


class Waiter(msgspec.Struct, eq=False):
    """A waiter for an outcome: its session, and the function that receives the outcome.

    :param local: True for a caller in this process, which can use the live value.
    :param task: the task that it represents, which will hold the result, managed or not; it has no session.
    :param refreshes: True if it requires a new result: neither a cached result nor another call's run will do; ``arguments``
        then identifies its arguments, None if nothing does.
    :param prepares: True if it requires a new result as a candidate, which its session is to hold.
    :param follow: called when the run's work starts, and when it reports progress.
    :param inner: True for a call by a running endpoint: it goes before others that wait for capacity, because they may wait
        for memory that the endpoint uses.
    :param pooled: True if it accepts a result in its session's pool.
    :param request_id: identifies its request in logs and errors.
    :param observed: its call, if there is a hook; ``how`` it is answered if it succeeds.
    :param run: its run.
    """

    session: str
    deliver: Callable[[Delivery | Failure], object]
    local: bool = False
    task: TaskHolder | None = None
    refreshes: bool = False
    arguments: str | None = None
    prepares: bool = False
    follow: Callable[[Run[Waiter]], None] | None = None
    inner: bool = False
    pooled: bool = False
    request_id: str = ""
    observed: Observed | None = None
    how: Literal["hit", "joined", "adopted", "built"] = "built"
    run: Run[Waiter] | None = None


def resolve(waiter: Waiter, outcome: Delivery | Failure) -> None:
    """Deliver an outcome. An error in one waiter must not affect the next one, nor end the server."""
    waiter.run = None
    if waiter.observed is not None:
        waiter.observed.answered(outcome, waiter.how)
    try:
        waiter.deliver(outcome)
    except Exception:
        _log.exception("the callback of a waiter of session %s failed", waiter.session)


class Waits:
    """The coroutines of a server, by owner: a waiter, a run or a move. On the loop only."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        #: True once calls are refused.
        self.stopped = False

    def begin(self, owner: Hashable, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, which must not raise.

        :raises ConnectionClosed: if the server was stopped.
        """
        if self.stopped:
            work.close()
            raise gone("arrived")
        task = self._tasks[owner] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(functools.partial(self._ended, owner))

    def leave(self, owner: Hashable) -> bool:
        """Cancel the coroutine of an owner that no longer waits; return False if it has none.

        One that has not begun is cancelled after its first step, since its clean-up runs only then; it detects the departure.
        """
        task = self._tasks.pop(owner, None)
        if task is None:
            return False
        if inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_CREATED:  # type: ignore[arg-type]
            task.get_loop().call_soon(task.cancel)
        else:
            task.cancel()
        return True

    def stop(self) -> None:
        """Cancel all; the current waiters and later ones get an error."""
        self.stopped = True
        for owner in tuple(self._tasks):
            self.leave(owner)
            if isinstance(owner, Waiter):
                resolve(owner, Failure.of(gone("ended")))

    def _ended(self, owner: Hashable, task: asyncio.Task[None]) -> None:
        if self._tasks.get(owner) is task:
            del self._tasks[owner]

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._tasks

    def __len__(self) -> int:
        """Return the number of waiters among the owners."""
        return sum(isinstance(owner, Waiter) for owner in self._tasks)


class Signal:
    """A repeatable event that wakes all current waiters."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake all waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next :meth:`set`."""
        await self._event.wait()


def gone(when: str) -> ConnectionClosed:
    """Return the error of a call ended by the server's stop."""
    return ConnectionClosed(f"the server (pid {os.getpid()}) was stopped before the call {when}")
