"""The supervisor alone, with workers that load, fail and end on the test's command."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import pytest_asyncio

from shared_rpc.broker import supervisor as supervisor_module
from shared_rpc.broker.supervisor import Spawner, Supervisor
from shared_rpc.broker.worker import ForkedWorker, WorkerCommand
from shared_rpc.broker.zygote import WorkerZygote
from shared_rpc.errors import ConfigurationError, WorkerCrashed
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message
from shared_rpc.server import sweeper


class FakeWorker:
    """A worker as the supervisor sees it, without a process."""

    def __init__(
        self,
        command: WorkerCommand,
        number: int,
        handlers: Mapping[type[Message], Callable[[FakeWorker, Message, Frame], None]],
        rest: Callable[[FakeWorker], None],
        ended: Callable[[FakeWorker], None],
        caught_up: Callable[[], None],
        restarts: int = 0,
        begun: ForkedWorker | None = None,
    ) -> None:
        self.number, self.restarts, self.pid = number, restarts, 0
        self.state, self.started = "starting", time.monotonic()
        self.served: dict[str, Any] = {}
        self.runs: dict[int, Any] = {}
        self.requests: dict[int, Any] = {}
        self.refusal: Exception | None = None
        self.forked = self.loaded = self.bare = False
        self.condemned = ""
        self._handlers, self._ended = handlers, ended

    def load(self) -> None:
        """Report that the app is imported."""
        self._handlers[w.Loaded](self, w.Loaded(), Frame(0, 0, b""))

    def kill(self, why: str) -> None:
        """End it."""
        if self.state != "ended":
            self.state, self.condemned = "ended", why
            self._ended(self)

    def hang_up(self) -> None:
        """End it at once, as requested."""
        self.kill("")

    def crash(self) -> WorkerCrashed:
        """Return the description of its end."""
        return WorkerCrashed(f"worker {self.number} has ended")


async def turns(condition: Callable[[], bool]) -> None:
    """Run the loop until a condition is true: the caller sees it in the very next turn."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never is")


class Stage:
    """A supervisor, all its workers so far, and the means to observe them."""

    def __init__(self, count: int) -> None:
        self.workers: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.zygote = WorkerZygote(WorkerCommand("app"))
        self.supervisor = Supervisor(WorkerCommand("app"), count, self.zygote, *[lambda *_: None] * 3)

    def make(self, *arguments: Any) -> Any:
        """Make a worker without a process."""
        self.workers.append(FakeWorker(*arguments))
        return self.workers[-1]

    def spawn(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        """See :class:`Spawner`."""
        task = asyncio.create_task(function(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def made(self, count: int) -> Any:
        """Wait for this many workers; return the latest one."""
        await turns(lambda: len(self.workers) >= count)
        return self.workers[-1]


@pytest.fixture
def workers() -> int:
    """The number of workers."""
    return 1


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, workers: int) -> Stage:
    """A supervisor, not started yet."""
    stage = Stage(workers)
    monkeypatch.setattr(supervisor_module, "Worker", stage.make)
    return stage


@pytest_asyncio.fixture
async def loaded(stage: Stage) -> Stage:
    """A supervisor whose workers have loaded the app."""
    await stage.supervisor.start(stage.spawn, wait=False)
    for worker in tuple(stage.workers):
        worker.load()
    return stage


@pytest_asyncio.fixture
async def starting(stage: Stage, workers: int) -> asyncio.Task[None]:
    """The start of a supervisor whose workers load the app."""
    starting = asyncio.create_task(stage.supervisor.start(stage.spawn))
    await stage.made(workers)
    return starting


@pytest.mark.asyncio
@pytest.mark.parametrize("workers", [2])
async def test_a_failed_first_load_fails_the_start(stage: Stage, starting: asyncio.Task[None]) -> None:
    """The app cannot be served: the caller gets the error at once, although another worker is still loading."""
    stage.workers[1].kill("its code is broken")
    with pytest.raises(WorkerCrashed, match="worker 1 has ended"):
        await starting


@pytest.mark.asyncio
@pytest.mark.parametrize("workers", [2])
async def test_configuration_errors_fail_the_start(stage: Stage, starting: asyncio.Task[None]) -> None:
    """Even after another worker has loaded the app; without retries."""
    stage.workers[0].load()
    stage.workers[1].refusal = ConfigurationError("there is no cuda:9")
    stage.workers[1].kill("")
    with pytest.raises(ConfigurationError, match="there is no cuda:9"):
        await starting


@pytest.mark.asyncio
async def test_a_failed_later_reload_fails_an_earlier_one(loaded: Stage) -> None:
    """Nothing has changed then: the workers are those from before both."""
    before = list(loaded.supervisor.workers)
    first = asyncio.create_task(loaded.supervisor.reload())
    new = await loaded.made(2)
    new.load()
    second = asyncio.create_task(loaded.supervisor.reload())  # requested before the first one has been reported
    broken = await loaded.made(3)
    broken.kill("its code is broken")
    for reload in (first, second):
        with pytest.raises(WorkerCrashed):
            await reload
    await turns(lambda: loaded.supervisor.all == before)


@pytest.mark.asyncio
async def test_workers_that_end_after_loading_are_returned(loaded: Stage) -> None:
    """A reload returns them, even if they end before it continues: there is always one with the endpoints."""
    reloads = [asyncio.create_task(loaded.supervisor.reload()) for _ in range(3)]
    new = await loaded.made(2)
    new.load()
    new.kill("it crashes at once")
    assert await asyncio.gather(*reloads) == [[new]] * len(reloads)


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
