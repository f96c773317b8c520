"""Background tasks of a broker: an error of one does not end the others, and the sweeper's tables are swept when due."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from shared_rpc.broker.supervisor import Spawner
from shared_rpc.server import sweeper


async def turns(condition: Callable[[], bool]) -> None:
    """Run the loop until a condition is true: the caller sees it in the very next turn."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never is")


def test_failing_tasks_end_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The group of the broker's tasks continues, and the log has the reason; an error of a vital task ends it."""
    done: list[str] = []

    async def fail() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    async def succeed() -> None:
        done.append("the other task")

    async def group(vital: bool) -> None:
        async with anyio.create_task_group() as tasks:
            spawn = Spawner(tasks)
            (spawn.vital if vital else spawn)(fail)
            await anyio.lowlevel.checkpoint()
            spawn(succeed)

    anyio.run(group, False)
    assert done and "too many open files" in caplog.text
    with pytest.raises(ExceptionGroup):
        anyio.run(group, True)


def test_expiries_due_during_a_sweep_are_swept(caplog: pytest.LogCaptureFixture) -> None:
    """Tables that were already swept are checked again when due, and not before. Errors of another one are logged."""
    sweeps: list[float] = []

    def fail() -> float:
        raise OSError(errno.EMFILE, "too many open files")

    async def story() -> None:
        clock = sweeper.BootClock()
        sweeping = sweeper.Sweeper(clock)

        def first() -> float | None:
            sweeps.append(clock.now())
            return 0.0 if len(sweeps) == 1 else None

        def second() -> None:
            sweeping.wake_within(0.05 if len(sweeps) == 2 else 3600.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sweeping.run, fail, first, second)
            await turns(lambda: len(sweeps) == 3)
            tasks.cancel_scope.cancel()

    anyio.run(story)
    assert sweeps[2] >= sweeps[1] + 0.05
    assert "too many open files" in caplog.text
