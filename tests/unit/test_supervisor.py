"""The supervisor alone, with workers that a test makes load, fail and end when it wants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from shared_rpc.broker import supervisor as supervisor_module
from shared_rpc.broker.command import WorkerCommand
from shared_rpc.broker.supervisor import Supervisor
from shared_rpc.broker.zygote import ForkedWorker, WorkerZygote
from shared_rpc.errors import ConfigurationError, WorkerCrashed
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Message


class FakeWorker:
    """What the supervisor knows of a worker, without a process."""

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
        self.endpoints: dict[str, Any] = {}
        self.runs: dict[int, Any] = {}
        self.refusal: Exception | None = None
        self.forked = self.loaded = False
        self._handlers, self._ended = handlers, ended

    def load(self) -> None:
        """It has imported the app."""
        self._handlers[w.Loaded](self, w.Loaded(), Frame(0, 0, b""))

    def kill(self, why: str) -> None:
        """It ends."""
        if self.state != "ended":
            self.state = "ended"
            self._ended(self)

    def hang_up(self) -> None:
        """It is to end by itself, and does at once."""
        self.kill("")

    def crash(self) -> WorkerCrashed:
        """How it ended."""
        return WorkerCrashed(f"worker {self.number} has ended")


async def turns(condition: Callable[[], bool]) -> None:
    """Let the loop go on until a condition is true: the caller sees it in the very next turn."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never is")


class Stage:
    """A supervisor, all workers that it has made so far, and what there is to watch them."""

    def __init__(self, count: int) -> None:
        self.workers: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.zygote = WorkerZygote(WorkerCommand("app"))
        self.supervisor = Supervisor(WorkerCommand("app"), count, self, self.zygote, {})

    def make(self, *arguments: Any) -> Any:
        """A worker, in place of a process."""
        self.workers.append(FakeWorker(*arguments))
        return self.workers[-1]

    def spawn(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        """See :class:`Spawner`."""
        task = asyncio.create_task(function(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def made(self, count: int) -> Any:
        """The latest worker, once there are so many."""
        await turns(lambda: len(self.workers) >= count)
        return self.workers[-1]

    def on_change(self, *_: object) -> None:
        """See :class:`WorkerObserver`."""

    on_endpoints = on_caught_up = on_lost = on_change


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], None]:
    """Runs a story with a supervisor whose worker has loaded the app."""

    async def begin(story: Callable[[Stage], Coroutine[Any, Any, None]], count: int) -> None:
        stage = Stage(count)
        monkeypatch.setattr(supervisor_module, "Worker", stage.make)
        await stage.supervisor.start(stage.spawn, wait=False)
        for worker in tuple(stage.workers):
            worker.load()
        await story(stage)

    return lambda story, count=1: asyncio.run(asyncio.wait_for(begin(story, count), 20))


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Stage, asyncio.Task[None]], Coroutine[Any, Any, None]]], None]:
    """Runs a story with a supervisor of two workers that load the app, and its start."""

    async def begin(story: Callable[[Stage, asyncio.Task[None]], Coroutine[Any, Any, None]]) -> None:
        stage = Stage(2)
        monkeypatch.setattr(supervisor_module, "Worker", stage.make)
        starting = asyncio.create_task(stage.supervisor.start(stage.spawn))
        await stage.made(2)
        await story(stage, starting)

    return lambda story: asyncio.run(asyncio.wait_for(begin(story), 20))


def test_a_worker_that_ends_before_any_has_loaded(start: Callable[..., None]) -> None:
    """The app cannot be served: whoever starts it is told at once, though another worker still tries."""

    async def story(stage: Stage, starting: asyncio.Task[None]) -> None:
        stage.workers[1].kill("its code is broken")
        with pytest.raises(WorkerCrashed, match="worker 1 has ended"):
            await starting

    start(story)


def test_a_worker_that_ends_when_another_one_has_loaded(start: Callable[..., None]) -> None:
    """It is started again, and the start is done; also if the one that had loaded has ended before."""

    async def story(stage: Stage, starting: asyncio.Task[None]) -> None:
        stage.workers[0].load()
        stage.workers[0].kill("")
        stage.workers[1].kill("")
        await starting
        await turns(lambda: len(stage.supervisor.workers) == 2)
        assert (stage.supervisor.crashes, stage.supervisor.restarts) == (2, {0: 1, 1: 1})

    start(story)


def test_a_worker_that_refuses_when_another_one_has_loaded(start: Callable[..., None]) -> None:
    """What is wrong with the configuration is told where the broker is started, and not tried again and again."""

    async def story(stage: Stage, starting: asyncio.Task[None]) -> None:
        stage.workers[0].load()
        stage.workers[1].refusal = ConfigurationError("there is no cuda:9")
        stage.workers[1].kill("")
        with pytest.raises(ConfigurationError, match="there is no cuda:9"):
            await starting

    start(story)


def test_a_process_that_cannot_begin_when_another_one_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, as after a crash."""

    async def story() -> None:
        stage, full = Stage(2), [OSError(24, "Too many open files")]

        async def begin(number: int) -> None:
            if number == 1:  # the first one has loaded meanwhile
                stage.workers[0].load()
                if full:
                    raise full.pop()

        monkeypatch.setattr(supervisor_module, "Worker", stage.make)
        monkeypatch.setattr(stage.zygote, "begin", begin)
        await stage.supervisor.start(stage.spawn)
        await turns(lambda: len(stage.supervisor.workers) == 2)

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_reload_that_was_done_is_no_failure_of_a_later_one(run: Callable[..., None]) -> None:
    """Its workers took over, and whoever asked for it has to see to what they replaced; the later one fails alone."""

    async def story(stage: Stage) -> None:
        first = asyncio.create_task(stage.supervisor.reload())
        new = await stage.made(2)
        new.load()
        second = asyncio.create_task(stage.supervisor.reload())  # asked for before the first one has been told
        broken = await stage.made(3)
        broken.kill("its code is broken")
        with pytest.raises(WorkerCrashed):
            await second
        assert await first == [new] == stage.supervisor.workers
        stage.supervisor.retire_old()
        await turns(lambda: stage.supervisor.all == [new])  # the one that was replaced ends

    run(story)


def test_a_worker_that_has_loaded_before_the_next_one_is_made(run: Callable[..., None]) -> None:
    """Forks come one after the other, and each is quick."""

    async def story(stage: Stage) -> None:
        reload = asyncio.create_task(stage.supervisor.reload())
        first = await stage.made(3)
        first.load()
        second = await stage.made(4)
        second.load()
        assert await reload == [first, second] == stage.supervisor.workers

    run(story, 2)


def test_a_later_reload_before_an_earlier_one_has_made_a_worker(run: Callable[..., None]) -> None:
    """The one that it makes then ends: it gives way, however its code hangs."""

    async def story(stage: Stage) -> None:
        async with stage.supervisor._zygote._asking:  # where the earlier one waits
            earlier = asyncio.create_task(stage.supervisor.reload())
            await turns(stage.supervisor._reloading.locked)
            later = asyncio.create_task(stage.supervisor.reload())
            await turns(lambda: stage.supervisor._asked == 2)
        new = await stage.made(3)
        new.load()
        assert await later == await earlier == [new]
        assert stage.workers[1].state == "ended"

    run(story)


def test_workers_that_end_as_soon_as_they_have_loaded(run: Callable[..., None]) -> None:
    """Whoever waits for them is told of them, however late its turn comes: there is always one to ask for its endpoints."""

    async def story(stage: Stage) -> None:
        reloads = [asyncio.create_task(stage.supervisor.reload()) for _ in range(500)]
        new = await stage.made(2)
        new.load()
        new.kill("it crashes at once")
        assert await asyncio.gather(*reloads) == [[new]] * len(reloads)

    run(story)
