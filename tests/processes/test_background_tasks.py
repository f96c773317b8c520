"""Background tasks of a broker: one that fails ends no other, the sweeper sweeps when due, and crash loops are refused."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from shared_rpc.broker import supervisor
from shared_rpc.broker.supervisor import Spawner
from shared_rpc.broker.worker import WorkerCommand
from shared_rpc.errors import WorkerCrashed
from shared_rpc.protocol.options import ServeOptions
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


def test_a_crash_loop_is_refused_until_its_period_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """After five ends within 30 s, unless a worker runs; slower ones are no loop. The error has the last end."""
    now = [100.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    workers = supervisor.Supervisor(WorkerCommand("app.py"), Mock(), Mock(), Mock())
    crash = WorkerCrashed("the worker was killed", signal="SIGKILL", stderr="its last words")

    def refused(seconds: float) -> list[bool]:
        found = []
        for _ in range(5):
            now[0] += seconds
            workers._count_crash(crash, lived=0.0)
            found.append(workers.refusal() is not None)
        return found

    assert (refused(7.5), refused(7.4)) == ([False] * 5, [True] * 5)
    error = workers.refusal()
    assert isinstance(error, WorkerCrashed) and (error.signal, error.stderr) == ("SIGKILL", "its last words")
    assert "5 workers ended within 30 s. The next one is started in 0 s" in str(error) and str(error).endswith(str(crash))
    workers.workers.append(Mock())
    assert workers.refusal() is None
    workers.workers.clear()
    now[0] += 0.4
    assert workers.refusal() is None


def test_a_starting_broker_continues_without_a_refused_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started later; a broker ends only if it has no worker at all."""
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE", 0.0)
    refused = WorkerCrashed("cannot start a worker: no process is left")

    async def started(*processes: int | Exception) -> list[int]:
        workers = supervisor.Supervisor(WorkerCommand("app.py", ServeOptions(workers=2)), Mock(), Mock(), Mock())
        loading = asyncio.get_running_loop().create_future()
        loading.set_result(None)
        made = [one if isinstance(one, Exception) else Mock(number=one, loading=loading) for one in processes]
        monkeypatch.setattr(workers, "_new", AsyncMock(side_effect=made))
        async with anyio.create_task_group() as tasks:
            await workers.start(Spawner(tasks))
        return [worker.number for worker in workers.workers]

    assert anyio.run(started, 0, refused, refused, 1) == [0, 1]
    with pytest.raises(ExceptionGroup) as ended:
        anyio.run(started, refused)
    assert ended.value.exceptions == (refused,)
