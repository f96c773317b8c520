"""The directory's actor: events of agents go in, decisions go out to them, and lost agents are noticed.

There is one for a cluster, on the node of whichever agent made it. It calls one method of each agent, :meth:`hold`, which does
not return, and so fails when the agent has ended; and gives it its decisions, in their order, one batch at a time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import msgspec
from ray.exceptions import ActorUnavailableError

from shared_rpc.cluster.directory import Directory, Rules
from shared_rpc.cluster.membership import LOST, first_line, named
from shared_rpc.cluster.orders import ClusterEvent, Decision, NodeFacts, NodeJoined, NodeLeft

__all__ = ["AGENT_GRACE", "RULES", "DirectoryActor"]

_log = logging.getLogger("shared_rpc.cluster")

#: Seconds in which an agent whose process has ended is back: what it was ordered goes on in its broker meanwhile.
AGENT_GRACE = 15.0
#: Seconds between two looks at the clock.
_TICK = 0.25


#: Agents serve parts of what they are receiving.
RULES = Rules(relay=True)


class _Joined:
    """An agent that has joined, under a number that each of its lives has anew."""

    def __init__(self, agent: Any, life: str, facts: NodeFacts) -> None:
        self.agent = agent
        self.facts = facts
        self.life = life
        self.outbox: list[Decision] = []
        self.wake = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        """End the tasks of the agent."""
        for task in self.tasks:
            task.cancel()


class DirectoryActor:
    """The driver of a :class:`~shared_rpc.cluster.directory.Directory`. All methods are coroutines of one loop."""

    async def __init__(self, cluster: str, rules: Rules = RULES) -> None:  # type: ignore[misc]  # Ray awaits it
        #: Tells this directory from an earlier one, whose orders mean nothing any more.
        self._epoch = secrets.token_hex(8)
        expected = await asyncio.to_thread(named, cluster, "agent")
        self._directory = Directory(rules, now=time.monotonic(), expected=expected, first_order=int(time.time() * 1e6))
        self._agents: dict[str, _Joined] = {}
        self._ticking = asyncio.create_task(self._tick())

    async def join(self, event: NodeJoined, life: str, agent: Any) -> str:
        """Take an agent in, or back; return this directory's epoch."""
        earlier = self._agents.get(event.node)
        if earlier is not None:
            earlier.stop()
        joined = self._agents[event.node] = _Joined(agent, life, event.facts)
        self._take(event)
        joined.tasks = [
            asyncio.create_task(self._deliver(event.node, joined)),
            asyncio.create_task(self._watch(event.node, joined)),
        ]
        return self._epoch

    async def report(self, node: str, life: str, events: list[ClusterEvent]) -> bool:
        """Take events in; return False if the agent has to join first."""
        joined = self._agents.get(node)
        if joined is None or joined.life != life:
            return False
        for event in events:
            self._take(event)
            if isinstance(event, NodeLeft):
                joined.stop()
                self._agents.pop(node, None)
        return True

    async def hold(self) -> None:
        """Wait for ever: a call of this ends with this directory."""
        await asyncio.Event().wait()

    async def kinds(self) -> tuple[int, dict[NodeFacts, str]]:
        """Return how many nodes there are, and for each kind of them the facts and one node's name."""
        kinds = {msgspec.structs.replace(joined.facts, host="", broker=""): node for node, joined in self._agents.items()}
        return len(self._agents), kinds

    async def status(self) -> dict[str, Any]:
        """Return what the directory knows, as plain data."""
        return self._directory.status()

    def _take(self, event: ClusterEvent) -> None:
        self._give(self._directory.handle(event, time.monotonic()))

    def _give(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            joined = self._agents.get(decision.node)
            if joined is not None:
                joined.outbox.append(decision)
                joined.wake.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            try:
                self._give(self._directory.tick(time.monotonic()))
            except Exception:
                _log.exception("the directory's clock stumbled")

    async def _deliver(self, node: str, joined: _Joined) -> None:
        """Give an agent its decisions, in their order."""
        while True:
            await joined.wake.wait()
            joined.wake.clear()
            batch, joined.outbox = joined.outbox, []
            try:
                await joined.agent.carry_out.remote(self._epoch, batch)
            except LOST as error:  # it joins again, or leaves
                _log.info("%s did not take %d decisions: %s", node, len(batch), error)
            except Exception as error:
                _log.exception("%s failed to take %d decisions", node, len(batch))
                self._left(node, joined, f"it failed to take the directory's decisions: {first_line(error)}")

    async def _watch(self, node: str, joined: _Joined) -> None:
        """Wait for an agent's end, and then for its return."""
        reason = "it has ended"
        try:
            await joined.agent.hold.remote()
        except ActorUnavailableError:
            reason = f"its agent has ended, and did not come back in {AGENT_GRACE:g} s"
            await asyncio.sleep(AGENT_GRACE)
        except Exception as error:
            reason = first_line(error)
        self._left(node, joined, reason)

    def _left(self, node: str, joined: _Joined, reason: str) -> None:
        """Take an agent out; it may join again."""
        if self._agents.get(node) is joined:
            del self._agents[node]
            self._take(NodeLeft(node, reason))
            joined.stop()
