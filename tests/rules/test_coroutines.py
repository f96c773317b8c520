"""Runs of coroutines on a loop, without a server: their ends, and their contexts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from shared_rpc import Provider
from shared_rpc.context import RunContext
from shared_rpc.errors import TaskCancelled
from shared_rpc.execution.coroutines import Coroutines
from shared_rpc.execution.in_process import InProcessExecutor
from shared_rpc.execution.outcomes import Failure
from shared_rpc.execution.run import Run
from shared_rpc.execution.threads import Job, WorkerThreads
from tests.kit.processes import eventually


@pytest.fixture
def ended() -> list[Any]:
    """The outcomes, in order of completion."""
    return []


def run_of_nobody() -> RunContext:
    """A run without waiting callers."""
    return RunContext(frozenset(), lambda progress: None)


@pytest.mark.asyncio
async def test_a_cancelled_coroutine_fails_with_task_cancelled(ended: list[Any]) -> None:
    """At its await."""

    coroutines, run = Coroutines(), run_of_nobody()
    coroutines.start("a run", "endpoint", run, [asyncio.Event().wait], ended.append)
    await asyncio.sleep(0)
    run.cancelled = True
    coroutines.cancel("a run")
    await asyncio.sleep(0.01)
    coroutines.cancel("a run")
    assert isinstance(ended[0], Failure)
    assert ended[0].code == TaskCancelled.code


@pytest.mark.asyncio
async def test_coroutines_are_cancelled_until_they_end(ended: list[Any]) -> None:
    """It is cancelled until it gives in."""
    asked = 0

    async def stubborn() -> None:
        nonlocal asked
        while asked < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                asked += 1

    coroutines = Coroutines()
    coroutines.start("a run", "endpoint", run_of_nobody(), [stubborn], ended.append)
    await asyncio.sleep(0)
    await coroutines.finish()
    assert asked == 3
    assert ended == [[None]]


class Ignoring:
    """An owner of runs that needs nothing about them."""

    def began(self, run: Any) -> None:
        """Ignore the begin."""

    progressed = ended = Mock()


@pytest.mark.asyncio
async def test_coroutines_begin_on_the_gpu_of_their_provider() -> None:
    """Also when the runs of several providers arrive in one turn."""
    current, begun = "", list[tuple[str, str]]()

    def executor(name: str) -> InProcessExecutor:
        provider = Provider(execution_mode="local")

        @provider.share(cache=False)
        async def endpoint() -> None:
            begun.append((name, current))

        def prepare() -> None:
            nonlocal current
            current = name

        made = InProcessExecutor(provider.endpoints, "cpu", shares=False)
        made.prepare = prepare  # type: ignore[method-assign]
        return made

    executors = [executor(name) for name in ("cuda:0", "cuda:1")]
    for each in executors:
        each.start(Run(each.endpoints["endpoint"].spec, None, ((), {}), publish=False), Ignoring())
    await asyncio.sleep(0.01)
    assert begun == [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")]


# Threads.


class _Result:
    """A job's result, whose record counts its closes."""

    def __init__(self) -> None:
        self.record = self
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("ends", ["after the last turn", "before close", "after close"])
def test_jobs_that_end_after_the_loop_leave_nothing(go: threading.Event, ends: str) -> None:
    """Their result is closed once, at any time."""
    threads, result = WorkerThreads(1, lambda: None), _Result()

    def work() -> _Result:
        go.wait(30)
        return result

    async def start() -> None:
        threads.start(Job(work, lambda _: pytest.fail("the loop has ended")))

    def end() -> None:
        go.set()
        eventually(lambda: threads.busy == 0)

    with asyncio.Runner() as runner:
        runner.run(start())
        loop = runner.get_loop()
        if ends == "after the last turn":
            closing, loop.close = loop.close, lambda: (end(), closing())[1]
    if ends == "before close":
        end()
    threads.close()
    end()
    eventually(lambda: result.closed == 1)


@pytest.mark.asyncio
async def test_failures_of_a_result_handler_block_no_job(caplog: pytest.LogCaptureFixture) -> None:
    """The next job begins, and the log has the error."""
    threads, over = WorkerThreads(1), asyncio.Event()
    threads.start(Job(lambda: None, Mock(side_effect=OSError("no descriptor"))))
    threads.start(Job(lambda: None, lambda _: over.set()))
    await asyncio.wait_for(over.wait(), 10)
    threads.close()
    assert "no descriptor" in caplog.text
