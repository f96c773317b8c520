"""The event loop of a server or a worker, and ``async def`` endpoints as its tasks."""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from shared_rpc.context import CURRENT_RUN, RunContext
from shared_rpc.errors import SharedRPCError, TaskCancelled
from shared_rpc.execution.outcomes import Failure

#: True if uvloop is installed.
USES_UVLOOP = importlib.util.find_spec("uvloop") is not None
#: Seconds between two cancellations of a coroutine that continues.
_AGAIN = 0.02

#: Called with a failure, or with a list of the value, which the callee empties.
Ended = Callable[[Failure | list[Any]], None]


class Coroutines:
    """Active runs by their keys. On the loop only."""

    def __init__(self) -> None:
        #: Strong references to the tasks: a loop keeps only weak ones.
        self._tasks: dict[object, asyncio.Task[Failure | None]] = {}
        #: The context of callbacks after an endpoint's end, without a current run. Only one thread at a time can enter a
        #: context, so each loop needs its own.
        self._outside = contextvars.Context()

    def start(
        self, name: object, endpoint: str, run: RunContext, begin: list[Callable[[], Awaitable[Any]]], ended: Ended
    ) -> None:
        """Run an endpoint in a task of its own, which it may cancel; ``ended`` is called outside that task, also after errors.

        :param begin: a single function to call and await; it is removed from the list.
        """
        value: list[Any] = []

        def done(task: asyncio.Task[Failure | None]) -> None:
            del self._tasks[name]
            # One that is cancelled before its first step has no result.
            ended(Failure.of(TaskCancelled()) if task.cancelled() else task.result() or value)

        task = self._tasks[name] = asyncio.get_running_loop().create_task(_awaited(begin.pop(), endpoint, run, value))
        task.add_done_callback(done, context=self._outside)

    def cancel(self, name: object) -> None:
        """Cancel a run at its current await, if any."""
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()

    async def finish(self) -> None:
        """Cancel all runs, repeatedly where a coroutine suppresses the cancellation."""
        while self._tasks:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.wait(self._tasks.values(), timeout=_AGAIN)


async def _awaited(begin: Callable[[], Awaitable[Any]], endpoint: str, run: RunContext, value: list[Any]) -> Failure | None:
    """Return any exception of the endpoint: SystemExit would end the loop and leave every waiter hanging."""
    CURRENT_RUN.set(run)
    pid = os.getpid()
    try:
        value.append(await begin())
    except SharedRPCError as error:
        return Failure.of(error)
    except asyncio.CancelledError as error:
        return Failure.of(TaskCancelled()) if run.cancelled else Failure.raised(error)
    except BaseException as error:
        return Failure.raised(error)
    finally:
        end_if_forked(pid, endpoint)
        del begin  # it refers to the arguments, and a kept error may keep this frame
    return None


def run_loop(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function in a new event loop of this thread, from uvloop if it is installed."""
    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": USES_UVLOOP})


def end_if_forked(pid: int, endpoint: str) -> None:
    """Exit if an endpoint that began in process ``pid`` returns or raises in a forked child.

    The child has nothing to return to below the endpoint's frame: the thread only waits for the next job, and the event loop
    reads the parent's descriptors. :mod:`multiprocessing` children and callers of ``os._exit()`` never return here.
    """
    if os.getpid() != pid:
        text = f"shared_rpc: endpoint {endpoint!r} forked this process (pid {os.getpid()}) from pid {pid}, and left it"
        print(f"{text}: end such a process by os._exit(), or use multiprocessing", file=sys.stderr, flush=True)
        os._exit(1)
