"""The zygote of a broker's workers: when one is made, used and ended, whatever happens while it starts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from shared_rpc.broker import zygote as zygotes
from shared_rpc.broker.supervisor import Supervisor
from shared_rpc.broker.worker import WorkerCommand
from shared_rpc.broker.zygote import WorkerZygote
from shared_rpc.errors import WorkerCrashed
from shared_rpc.protocol.worker import Loaded

pytestmark = pytest.mark.asyncio

#: The imports of an app.
IMPORTS = Loaded(installed=["numpy"], own=["app"], variables={})


class FakeRunning:
    """A zygote's process that is ready at once, and refuses to fork.

    ``made`` are all of them; ``preparing`` is called while the first one imports modules.
    """

    made: list[FakeRunning]
    preparing: Callable[[FakeRunning], object]

    def __init__(self, imports: Loaded, lost: Callable[..., object]) -> None:
        self.imports, self.forks = imports, 0
        self.child = SimpleNamespace(pid=os.getpid(), exited=asyncio.Event(), reap=self.reap)
        self.made.append(self)

    async def prepare(self, **_: Any) -> dict[str, Any]:
        """Import nothing."""
        if len(self.made) == 1:
            FakeRunning.preparing(self)
        return {"type": "Ready", "modules": 1}

    async def fork(self, *_: Any) -> tuple[dict[str, Any], Any]:
        """Count the request."""
        self.forks += 1
        return {"type": "ForkRefused"}, SimpleNamespace(close=lambda: None)

    async def reap(self, seconds: float) -> None:
        """Wait for nothing."""

    def end(self) -> None:
        """End nothing."""

    def ended(self) -> str:
        """Describe an end."""
        return "the zygote was killed"


@pytest_asyncio.fixture
async def zygote(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerZygote]:
    """The zygote of a broker, before a worker has loaded the app."""
    monkeypatch.setattr(zygotes, "_SETTLE", 0.0)
    monkeypatch.setattr(zygotes, "_Running", FakeRunning)
    monkeypatch.setattr(FakeRunning, "made", [], raising=False)
    monkeypatch.setattr(FakeRunning, "preparing", lambda _: None, raising=False)
    zygote = WorkerZygote(WorkerCommand("app.py"))
    running = asyncio.create_task(zygote.run())
    yield zygote
    running.cancel()
    await asyncio.wait([running])


async def settled() -> None:
    """Run the loop until all that is due has been done."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_another_zygote_follows_a_fork_that_ended_early(zygote: WorkerZygote) -> None:
    """The next worker is a new process, and the one after it a fork again."""
    assert zygote.info() == {"state": "waiting", "why": "it is started 0 s after a worker has loaded the app"}
    zygote.learn(IMPORTS, forked=False)
    await settled()
    zygote.ended(loaded=False, by_signal=False)
    await settled()
    last = FakeRunning.made[-1]
    await zygote.begin(0)
    assert (zygote.info()["state"], last.forks) == ("ready", 0)
    await zygote.begin(0)
    assert last.forks == 1


async def test_zygotes_given_up_while_they_start_stay_off(zygote: WorkerZygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the meantime a fork of an earlier one reports that the app sets variables."""
    sets = Loaded(installed=[], own=[], variables={"LEVEL": "2"})
    monkeypatch.setattr(FakeRunning, "preparing", lambda _: zygote.learn(sets, forked=True))
    zygote.learn(IMPORTS, forked=False)
    await settled()
    assert zygote.info()["state"] == "off" and "LEVEL" in zygote.info()["why"]


async def test_zygotes_that_end_as_they_become_ready_are_replaced(
    zygote: WorkerZygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is requested from the ended process."""
    monkeypatch.setattr(FakeRunning, "preparing", lambda running: running.child.exited.set())
    zygote.learn(IMPORTS, forked=False)
    await settled()
    assert (zygote.info()["state"], len(FakeRunning.made)) == ("ready", 2)


@pytest.mark.parametrize("how", ["ends", "retired", "overtaken", "sibling"])
async def test_only_forks_that_end_by_themselves_blame_the_zygote(how: str) -> None:
    """Not those that a reload replaces while they load the app, nor the others of a reload that fails."""
    supervisor = Supervisor(WorkerCommand("app.py"), print, lambda: None, lambda worker, crash: None)
    ended: list[Any] = []
    supervisor.zygote.ended = lambda *facts: ended.append(facts)  # type: ignore[method-assign]
    reasons = {"overtaken": "a later reload took its place", "sibling": "another worker of the same reload failed"}
    worker: Any = SimpleNamespace(
        forked=True,
        loaded=False,
        bare=False,
        number=0,
        started=0.0,
        refusal=None,
        condemned=reasons.get(how, ""),
        loading=asyncio.Future(),
        crash=lambda: WorkerCrashed("it ended", exit_code=0),
        settle=lambda error: None,
    )
    (supervisor._old if how == "retired" else supervisor._next).append(worker)
    supervisor._ended(worker)
    assert len(ended) == (how == "ends")
