"""Background tasks and children of a broker: failing tasks, sweeps when due, crash loops, and the ends of processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
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
from shared_rpc.execution.child import Backoff, Child
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


# A child process as an event loop watches it, and the delays before its successor.


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("exit 3", "exited with code 3"),
        ("kill -9 $$", "was killed by SIGKILL"),
        ("sleep 600 & exit 0", "exited with code 0"),  # which has the pipe
    ],
)
def test_exit_status_and_last_output_are_reported(command: str, how: str) -> None:
    """Its code or signal, and its last output, when its end is reported, even if a grandchild keeps the pipe for hours."""
    words = ["sh", "-c", f"echo last words >&2; {command}"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, bufsize=0, process_group=0)

    async def watch() -> tuple[str, str]:
        ended = asyncio.Event()
        child = Child(process, process.stderr, ended.set, passes_on=False)
        await asyncio.wait_for(ended.wait(), 30)
        return child.how(), child.last_output()

    try:
        assert asyncio.run(watch()) == (how, "last words")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_child_that_does_not_end_when_asked_is_killed() -> None:
    """When its grace is over, and its end is not reported then."""
    words = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 60; done"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, process_group=0)
    reports: list[str] = []

    async def end() -> str:
        child = Child(process, process.stderr, lambda: reports.append("ended"), passes_on=False)
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline() == b"ready\n"
        child.terminate()
        child.end(time.monotonic())
        await asyncio.sleep(0)
        return child.how()

    try:
        assert (asyncio.run(end()), reports) == ("was killed by SIGKILL", [])
    finally:
        with suppress(ProcessLookupError):  # its sleep may not have begun
            os.killpg(process.pid, signal.SIGKILL)


def test_pauses_double_for_children_that_end_soon() -> None:
    """Up to a limit; one that lived longer is followed by the first pause again."""
    pauses, found = Backoff(first=1.0, longest=5.0, soon=10.0), []
    for lived in (3.0, 3.0, 3.0, 3.0, 60.0, 3.0):
        pauses.note(lived)
        found.append(pauses.pause)
    assert found == [1.0, 2.0, 4.0, 5.0, 1.0, 1.0]
