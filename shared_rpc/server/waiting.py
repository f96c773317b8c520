"""Waiting in a server: who waits for an outcome, and the coroutines of what waits. To leave is to cancel the coroutine."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any

from shared_rpc.errors import ConnectionClosed
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import Run
from shared_rpc.memory.records import Record
from shared_rpc.server.observing import Observed
from shared_rpc.server.state.leases import TaskHolder
from shared_rpc.server.state.objects import StoredObject

_log = logging.getLogger("shared_rpc.server")


@dataclass(slots=True)
class Delivery:
    """The outcome of a call for one waiter. The record is borrowed while the delivery is handled.

    ``stored`` is the object where the server keeps it; with ``managed`` the waiter's session holds a lease on it now.
    """

    record: Record | None
    live: Any
    stored: StoredObject | None
    managed: bool


@dataclass(eq=False, slots=True)
class Waiter:
    """A waiter for an outcome: its session, and the receiver of the outcome.

    :param local: whether it is a caller in this process, which can use the live value.
    :param task: the task that it is, which is to hold the result, managed or not; it has no session.
    :param refreshes: whether it wants a new result, and takes none: what there is in the cache is no answer to it, nor what
        another call's run will bring; ``arguments`` then identifies its arguments, None if nothing does.
    :param prepares: whether it wants a new result as a candidate, and its session is to hold that.
    :param follow: called when the run's work starts, and when it reports progress.
    :param on_out_of_memory: called with why, if the result has to wait for memory.
    :param inner: whether it is the call of an endpoint that runs: it goes before others that wait for capacity: what
        they wait for may be what that endpoint uses.
    :param pooled: whether it takes a result that lies in its session's pool.
    :param request_id: identifies its request in logs and errors.
    :param observed: its call, if there is a hook.
    :param run: the run that it waits for; of a call of an endpoint with ``execution="task"``, ``behind`` is the task's waiter.
    """

    session: str
    deliver: Callable[[Delivery | Failure], object]
    local: bool = False
    task: TaskHolder | None = None
    refreshes: bool = False
    arguments: str | None = None
    prepares: bool = False
    follow: Callable[[Run[Waiter]], None] | None = None
    on_out_of_memory: Callable[[str], None] | None = None
    inner: bool = False
    pooled: bool = False
    request_id: str = ""
    observed: Observed | None = field(default=None, repr=False)
    run: Run[Waiter] | None = field(default=None, repr=False)
    behind: Waiter | None = field(default=None, repr=False)


def resolve(waiter: Waiter, outcome: Delivery | Failure) -> None:
    """Deliver. An error of one waiter must not affect the next one, nor end the server."""
    waiter.run = None
    if waiter.observed is not None:
        waiter.observed.answered(outcome)
    try:
        waiter.deliver(outcome)
    except Exception:
        _log.exception("the callback of a waiter of session %s failed", waiter.session)


class Waits:
    """The coroutines of a server, by what each works for: a waiter, a run, a move. On the loop only."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._stopped = False

    def begin(self, owner: Hashable, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, which must not raise.

        :raises ConnectionClosed: if the server was stopped.
        """
        if self._stopped:
            work.close()
            raise gone("came")
        task = self._tasks[owner] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(functools.partial(self._ended, owner))

    def leave(self, owner: Hashable) -> bool:
        """Cancel the coroutine of an owner that no longer waits; False if it has none.

        One that has not begun is cancelled when it has: only then does its clean-up run. It finds that its owner left.
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
        """Cancel all; the waiters, and later ones, get an error."""
        self._stopped = True
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
        """Count the waiters among the owners."""
        return sum(isinstance(owner, Waiter) for owner in self._tasks)


class Signal:
    """An event that is set for all who wait for it now, again and again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake all who wait."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next time."""
        await self._event.wait()


def gone(when: str) -> ConnectionClosed:
    """Return the error of a call that the server's stop ends."""
    return ConnectionClosed(f"the server (pid {os.getpid()}) was stopped before the call {when}")
