"""Cluster of nodes that exist in memory: a clock and a network of its own, and the directory of the package.

What is modelled: links (bytes a second of each node, in and out, shared by its transfers; a limit for one transfer), parts (a
transfer is a sequence of them, and its rate is that of the links when the part begins), builds, the latency of messages, and
the directory as one server that takes a time for each message. Not modelled are switches, other traffic, and disks.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared_rpc.cluster.directory import Directory, Rules
from shared_rpc.cluster.orders import (
    Abandon,
    Advanced,
    Answer,
    Blame,
    Build,
    BuildCandidate,
    Built,
    ChangeOver,
    ClusterEvent,
    Decision,
    Done,
    FailMisses,
    Fetch,
    Group,
    Holding,
    Invalidate,
    Key,
    Missed,
    NodeFacts,
    NodeJoined,
    NodeLeft,
    Order,
    OrderFailed,
    RefreshRequested,
    Rejoin,
    Version,
)

__all__ = ["KEY", "Hardware", "SimulatedCluster"]

KEY = Key("load_model", "load_model()", Group("fingerprint", "cuda", "3.11", "2.13.0", "0.1.0"))


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Sizes of a cluster. Times are seconds, rates are bytes a second.

    :param nbytes: the object, which travels in parts of ``part`` bytes.
    :param bandwidth: of a node's link, in each direction.
    :param stream: the most that one transfer gets.
    :param build: how long a build takes.
    :param swap: how long a promotion takes at a node.
    :param latency: of a message, one way.
    :param message: the time that the directory takes for each event, and for each decision.
    :param detection: until a lost node is known to be lost.
    """

    nbytes: int = 16 << 30
    part: int = 64 << 20
    bandwidth: float = 25e9 / 8
    stream: float = float("inf")
    build: float = 60.0
    swap: float = 0.02
    latency: float = 0.5e-3
    message: float = 0.3e-3
    detection: float = 5.0

    @property
    def parts(self) -> int:
        """Parts of the object."""
        return -(-self.nbytes // self.part)

    @property
    def transfer(self) -> float:
        """Time of a transfer that has two links for itself."""
        return self.nbytes / min(self.bandwidth, self.stream)


@dataclass(eq=False)
class _Flow:
    """A transfer: it stops when the order is no longer that of its room."""

    order: Fetch
    room: _Room


@dataclass(eq=False)
class _Room:
    """A version at a node: its parts that have arrived, the transfer that fills it, and transfers that wait for its parts."""

    parts: int = 0
    flow: _Flow | None = None
    waiting: list[_Flow] = field(default_factory=list)


@dataclass(eq=False)
class _Node:
    """A node with its agent. ``speed`` is a factor of its link's rates."""

    name: str
    speed: float = 1.0
    build: float = 1.0
    alive: bool = True
    rooms: dict[Version, _Room] = field(default_factory=dict)
    current: Version | None = None
    orders: dict[int, Order] = field(default_factory=dict)
    reporting: bool = False
    sending: int = 0
    receiving: int = 0


class SimulatedCluster:
    """Nodes ``n0``, ``n1``, …, each with an agent that carries out what the directory orders.

    ``served`` has the time at which the callers of each node had the current version, by version's number.
    """

    def __init__(self, nodes: int, hardware: Hardware, rules: Rules, *, seed: int = 0) -> None:
        self.hardware = hardware
        self.rules = rules
        self.random = random.Random(seed)
        self.now = 0.0
        self.directory = Directory(rules, now=0.0)
        self.nodes = {name: _Node(name) for name in (f"n{number}" for number in range(nodes))}
        self.served: dict[int, dict[str, float]] = {}
        #: Nodes that are alive and whose callers wait.
        self.waiting: set[str] = set()
        self.failed: dict[str, str] = {}
        self.answers: list[tuple[float, Answer]] = []
        #: Seconds of this machine in the directory's code, and messages by kind.
        self.busy = 0.0
        self.longest = 0.0
        self.messages = 0
        self.sent_bytes = 0
        self._free_at = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._ticking = False
        for node in self.nodes.values():
            self._tell(NodeJoined(node.name, NodeFacts(node.name)))
        self.run()
        self.directory_cost = (self.busy, self.messages)
        self.busy, self.messages, self.now, self._free_at = 0.0, 0, 0.0, 0.0

    # The clock.

    def at(self, moment: float, action: Callable[..., None], *args: Any) -> None:
        """Do something at a time, in seconds."""
        heapq.heappush(self._queue, (moment, next(self._order), action, args))

    def run(self, until: float = float("inf"), done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, until nothing happens any more."""
        while self._queue and self._queue[0][0] <= until and not done():
            self.now, _, action, args = heapq.heappop(self._queue)
            action(*args)

    # Messages.

    def _tell(self, event: ClusterEvent) -> None:
        self.at(self.now + self.hardware.latency, self._arrive, event)

    def _arrive(self, event: ClusterEvent) -> None:
        """Queue an event at the directory, which takes one after the other."""
        begin = max(self.now, self._free_at)
        self._free_at = begin + self.hardware.message
        self.at(self._free_at, self._handle, event)

    def _handle(self, event: ClusterEvent | None) -> None:
        clock = time.perf_counter()
        now = self.now
        decisions = self.directory.handle(event, now) if event is not None else self.directory.tick(now)
        taken = time.perf_counter() - clock
        self.busy += taken
        self.longest = max(self.longest, taken)
        self.messages += (event is not None) + len(decisions)
        self._free_at = max(self._free_at, now) + self.hardware.message * len(decisions)
        for number, decision in enumerate(decisions, 1):
            self.at(now + self.hardware.message * number + self.hardware.latency, self._receive, decision)

    def start_ticking(self) -> None:
        """Have the directory look at the clock once a second, as long as nodes carry out orders."""
        if not self._ticking:
            self._ticking = True
            self.at(self.now + 1, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._handle(None)
        if any(node.orders and node.alive for node in self.nodes.values()) or self._queue:
            self.start_ticking()

    def _report(self, node: _Node) -> None:
        if not node.alive or not node.orders:
            node.reporting = False
            return
        part = self.hardware.part
        arrived = {
            order.id: node.rooms[order.version].parts * part if isinstance(order, Fetch) else 0
            for order in node.orders.values()
        }
        self._tell(Advanced(node.name, arrived))
        self.at(self.now + self.rules.report_every, self._report, node)

    # What users do.

    def miss(self, node: str) -> None:
        """Call the model at a node."""
        self.waiting.add(node)
        self._tell(Missed(node, KEY))
        self.start_ticking()

    def refresh(self, node: str) -> None:
        """Ask for a new version."""
        self._tell(RefreshRequested(node, f"r{len(self.answers)}", KEY.endpoint, KEY.cache_key, b"", KEY))
        self.start_ticking()

    # What happens to nodes.

    def lose(self, name: str) -> None:
        """Lose a node: its transfers stand still, and after a while the directory is told."""
        node = self.nodes[name]
        node.alive = False
        self.waiting.discard(name)
        for room in node.rooms.values():
            room.flow = None
        self.at(self.now + self.hardware.detection, self._tell, NodeLeft(name))

    def join(self, name: str, version: Version | None = None) -> None:
        """Have a node come, or come back, with a version or none."""
        node = self.nodes[name] = _Node(name)
        holdings: tuple[Holding, ...] = ()
        if version is not None:
            node.current, node.rooms[version] = version, _Room(self.hardware.parts)
            holdings = (Holding(KEY, version, self.hardware.nbytes),)
        self._tell(NodeJoined(name, NodeFacts(name), holdings))
        self.start_ticking()

    def hold(self, version: Version) -> None:
        """Have all nodes hold a version from the beginning."""
        for name in self.nodes:
            self.join(name, version)
        self.run(until=self.now + 1 + 2 * len(self.nodes) * self.hardware.message)
        self.busy, self.messages = 0.0, 0

    # Agents.

    def _receive(self, decision: Decision) -> None:
        if isinstance(decision, Answer):
            self.answers.append((self.now, decision))
            return
        node = self.nodes[decision.node]
        if not node.alive:
            return
        if isinstance(decision, FailMisses):
            self.failed[node.name] = decision.error
            self.waiting.discard(node.name)
        elif isinstance(decision, Abandon):
            self._abandon(node, decision.version)
        elif isinstance(decision, Rejoin):
            raise RuntimeError(f"the directory does not know {node.name}")
        else:
            self._begin(node, decision)

    def _begin(self, node: _Node, order: Order) -> None:
        if isinstance(order, Fetch):
            for other in [o for o in node.orders.values() if isinstance(o, Fetch) and o.version == order.version]:
                del node.orders[other.id]
        node.orders[order.id] = order
        if not node.reporting:
            node.reporting = True
            self.at(self.now + self.rules.report_every, self._report, node)
        if isinstance(order, (Build, BuildCandidate)):
            self.at(self.now + self.hardware.build * node.build, self._finish_build, node, order)
        elif isinstance(order, Fetch):
            room = node.rooms.setdefault(order.version, _Room())
            room.flow = _Flow(order, room)
            self._next_part(room.flow)
        elif isinstance(order, ChangeOver):
            self.at(self.now + self.hardware.swap, self._finish_swap, node, order)
        else:
            self.at(self.now + self.hardware.swap, self._finish_invalidation, node, order)

    def _abandon(self, node: _Node, version: Version) -> None:
        if version != node.current and (room := node.rooms.pop(version, None)) is not None:
            room.flow = None
        node.orders = {i: o for i, o in node.orders.items() if not (isinstance(o, Fetch) and o.version == version)}

    def _answer(self, node: _Node, order: Order, event: ClusterEvent) -> None:
        if node.alive and node.orders.pop(order.id, None) is not None:
            self._tell(event)

    def _finish_build(self, node: _Node, order: Build | BuildCandidate) -> None:
        if not node.alive:
            return
        version = Version(order.number, f"{order.number}")
        node.rooms[version] = _Room(self.hardware.parts)
        if isinstance(order, Build):
            self._serve(node, version)
        self._answer(node, order, Built(order, version.digest, self.hardware.nbytes))

    def _finish_swap(self, node: _Node, order: ChangeOver) -> None:
        if node.alive:
            self._serve(node, order.version)
        self._answer(node, order, Done(order))

    def _finish_invalidation(self, node: _Node, order: Invalidate) -> None:
        node.rooms.clear()
        node.current = None
        self._answer(node, order, Done(order))

    def _serve(self, node: _Node, version: Version) -> None:
        node.current = version
        self.waiting.discard(node.name)
        self.served.setdefault(version.number, {})[node.name] = self.now

    # The network.

    def _next_part(self, flow: _Flow) -> None:
        order, room = flow.order, flow.room
        if room.flow is not flow:
            return
        node, source = self.nodes[order.node], self.nodes[order.source]
        if room.parts >= self.hardware.parts:
            self._finish_transfer(node, order, room)
            return
        if not source.alive:
            return  # it stands still until the directory gives it another source
        there = source.rooms.get(order.version)
        if there is None or (there.parts < self.hardware.parts and not order.relay):
            self._answer(node, order, OrderFailed(order, f"{source.name} has it no more", Blame.SOURCE))
            room.flow = None
            return
        if there.parts <= room.parts:
            there.waiting.append(flow)
            return
        source.sending += 1
        node.receiving += 1
        hardware = self.hardware
        rate = min(
            hardware.stream,
            hardware.bandwidth * source.speed / source.sending,
            hardware.bandwidth * node.speed / node.receiving,
        )
        self.at(self.now + hardware.part / rate, self._part_arrived, flow, source, node)

    def _part_arrived(self, flow: _Flow, source: _Node, node: _Node) -> None:
        source.sending -= 1
        node.receiving -= 1
        if flow.room.flow is not flow or not source.alive or not node.alive:
            return
        flow.room.parts += 1
        self.sent_bytes += self.hardware.part
        waiting, flow.room.waiting = flow.room.waiting, []
        for other in waiting:
            self._next_part(other)
        self._next_part(flow)

    def _finish_transfer(self, node: _Node, order: Fetch, room: _Room) -> None:
        room.flow = None
        if not order.candidate:
            self._serve(node, order.version)
        self._answer(node, order, Done(order))
