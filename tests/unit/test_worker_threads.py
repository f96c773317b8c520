"""Jobs of worker threads whose loop ends, or whose result cannot be handled."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

import pytest

from shared_rpc.execution.threads import Job, WorkerThreads
from tests.kit.processes import eventually


class _Result:
    """What a job returns, with a record that counts how often it is closed."""

    def __init__(self) -> None:
        self.record = self
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("ends", ["after the last turn", "before close", "after close"])
def test_a_job_that_ends_beside_the_loop_leaves_nothing(go: threading.Event, ends: str) -> None:
    """Whenever that is, its result is closed, and once."""
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
async def test_a_result_that_cannot_be_handled_holds_up_no_job(caplog: pytest.LogCaptureFixture) -> None:
    """The next job begins, and the log has the error."""
    threads, over = WorkerThreads(1), asyncio.Event()
    threads.start(Job(lambda: None, Mock(side_effect=OSError("no descriptor"))))
    threads.start(Job(lambda: None, lambda _: over.set()))
    await asyncio.wait_for(over.wait(), 10)
    threads.close()
    assert "no descriptor" in caplog.text
