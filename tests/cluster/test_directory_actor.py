"""The directory's actor and agents that fail in other ways than by their end; without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shared_rpc.cluster import directory_actor
from shared_rpc.cluster.directory_actor import DirectoryActor
from shared_rpc.cluster.orders import NodeFacts, NodeJoined


class Failing:
    """An agent of which one method fails; the other one does not return."""

    def __init__(self, method: str, error: Exception) -> None:
        for name in ("hold", "carry_out"):
            setattr(self, name, SimpleNamespace(remote=self._raise if name == method else self._wait))
        self._error = error

    async def _raise(self, *_: Any) -> None:
        raise self._error

    async def _wait(self, *_: Any) -> None:
        await asyncio.Event().wait()


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["hold", "carry_out"])
@pytest.mark.parametrize("error", [ConnectionError(), ValueError("a decision of another release")], ids=["empty", "another"])
async def test_an_agent_that_fails_has_left(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    """Whatever its error is, and whether it has a text: the node is not waited for, and its agent has to join again."""
    monkeypatch.setattr(directory_actor, "LOST", (ConnectionError,) if method == "hold" else ())
    monkeypatch.setattr(directory_actor, "named", lambda *_: [])
    actor = DirectoryActor.__new__(DirectoryActor)
    await actor.__init__("c")  # type: ignore[misc]
    await actor.join(NodeJoined("a", NodeFacts("a")), "life", Failing(method, error))
    tasks = actor._agents["a"].tasks
    actor._give([SimpleNamespace(node="a")])  # type: ignore[list-item]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (str(error) or type(error).__name__) in (await actor.status())["left"]["a"]
    assert not await actor.report("a", "life", [])
    actor._ticking.cancel()
