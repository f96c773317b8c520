"""The directory of a cluster beside nodes that join, fail, fall silent and are lost, in any order, and its own restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    Dropped,
    FailMisses,
    Fetch,
    Holding,
    InvalidationRequested,
    Key,
    Missed,
    MissWithdrawn,
    NodeFacts,
    NodeJoined,
    NodeLeft,
    Order,
    OrderFailed,
    RefreshRequested,
    Rejoin,
    Version,
)
from tests.kit.clusters import GROUP

KEYS = [Key("f", "f(1)", GROUP), Key("g", "g(1)", GROUP)]
NODES = ["n0", "n1", "n2", "n3", "n4", "n5"]
#: Two nodes share a host.
HOSTS = {"n4": "h", "n5": "h"}


@dataclass
class Node:
    """What a node really has, wants and does; ``ignored`` are orders about which it says nothing."""

    listed: dict[Key, Version] = field(default_factory=dict)
    candidates: set[tuple[Key, Version]] = field(default_factory=set)
    misses: set[Key] = field(default_factory=set)
    orders: dict[int, Order] = field(default_factory=dict)
    ignored: dict[int, Order] = field(default_factory=dict)

    def has(self, key: Key, version: Version) -> bool:
        """Whether it has the bytes of a version; the number may have been unknown to who ordered it."""
        found = [self.listed[key]] if key in self.listed else []
        found += [candidate for of, candidate in self.candidates if of == key]
        return any(one.digest == version.digest for one in found)


class DirectoryModel(RuleBasedStateMachine):
    """Nodes that carry out orders when a rule says so. Messages arrive at once."""

    relay = False

    @initialize(fan_out=st.integers(1, 2))
    def start(self, fan_out: int) -> None:
        """An empty cluster."""
        self.rules_of = Rules(fan_out=fan_out, relay=self.relay, builders=3, transfers=3, prepare_timeout=60, patience_least=60)
        self.now, self.builds, self.requests = 0.0, 0, 0
        self.nodes: dict[str, Node] = {}
        #: Orders of this start of the directory, and requests to it that are not answered.
        self.directory = Directory(self.rules_of, now=0.0)
        self.first = 1
        self.open: dict[str, str] = {}
        #: Nodes that lost a version without a word.
        self.evicted: set[tuple[str, Key]] = set()

    # Messages.

    def send(self, event: ClusterEvent) -> None:
        """Let an event arrive, and all that comes of it."""
        for decision in self.directory.handle(event, self.now):
            self.receive(decision)

    def receive(self, decision: Decision) -> None:
        """Take a decision in."""
        if isinstance(decision, Rejoin):
            if decision.node in self.nodes:
                self.state(decision.node)
        elif isinstance(decision, Answer):
            if decision.request in self.open:
                assert self.open.pop(decision.request) == decision.node
        elif isinstance(decision, Abandon):
            node = self.nodes[decision.node]
            self.forget_candidate(node, decision.key, decision.version)
            node.orders = {number: order for number, order in node.orders.items() if not _is_fetch_of(order, decision)}
        elif isinstance(decision, FailMisses):
            self.nodes[decision.node].misses.discard(decision.key)
        else:
            self.begin(decision)

    def begin(self, order: Order) -> None:
        """Have a node begin to carry out an order."""
        node = self.nodes[order.node]
        assert order.id not in node.orders
        if isinstance(order, Fetch):
            self.check_source(order)
            node.orders = {number: other for number, other in node.orders.items() if not _is_fetch_of(other, order)}
        node.orders[order.id] = order

    def check_source(self, order: Fetch) -> None:
        """A source has the version, or is receiving it from one that has it, and not from the receiver."""
        source, seen = order.source, {order.node}
        while not self.nodes[source].has(order.key, order.version):
            if (source, order.key) in self.evicted:
                return
            assert order.relay and source not in seen
            seen.add(source)
            orders = [*self.nodes[source].orders.values(), *self.nodes[source].ignored.values()]
            above = next((other for other in orders if _is_fetch_of(other, order)), None)
            if above is None:  # it carries an order out that is not known to be lost yet
                assert any(_is_fetch_of(work.order, order) for work in self.directory._members[source].orders.values())
                return
            assert isinstance(above, Fetch)
            source = above.source
            if source not in self.nodes:
                return
        assert source != order.node

    def state(self, name: str, *, orders: bool = True, numbers: bool = True) -> None:
        """Have a node state what it holds."""
        node = self.nodes[name]
        held = [(key, version, False) for key, version in node.listed.items()]
        held += [(key, version, True) for key, version in sorted(node.candidates)]
        holdings = tuple(
            Holding(key, version if numbers else Version(0, version.digest), 100, candidate) for key, version, candidate in held
        )
        stated = tuple(node.orders.values()) if orders else ()
        if not orders:
            node.orders.clear()
            node.ignored.clear()
        self.evicted = {(evicted, key) for evicted, key in self.evicted if evicted != name}
        facts = NodeFacts(HOSTS.get(name, name))
        self.send(NodeJoined(name, facts, holdings, tuple(sorted(node.misses)), stated))

    # Rules.

    @rule(name=st.sampled_from(NODES))
    def join(self, name: str) -> None:
        """A node comes, or its agent is restarted."""
        self.nodes.setdefault(name, Node())
        self.state(name, orders=False)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def join_with_digests_alone(self, data: st.DataObject) -> None:
        """An agent is restarted and does not know the versions' numbers."""
        self.state(data.draw(st.sampled_from(sorted(self.nodes))), orders=False, numbers=False)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A node is lost with all it has."""
        name = data.draw(st.sampled_from(sorted(self.nodes)))
        del self.nodes[name]
        self.open = {request: asker for request, asker in self.open.items() if asker != name}
        self.evicted = {(evicted, key) for evicted, key in self.evicted if evicted != name}
        self.send(NodeLeft(name))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def miss(self, data: st.DataObject, key: Key) -> None:
        """A call at a node that does not have it."""
        name = data.draw(st.sampled_from(sorted(self.nodes)))
        node = self.nodes[name]
        building = any(o.key == key and isinstance(o, Build) for o in [*node.orders.values(), *node.ignored.values()])
        if key not in node.listed and not building:  # else it joins the run
            node.misses.add(key)
            self.evicted.discard((name, key))
            self.send(Missed(name, key))

    def one_of(self, data: st.DataObject, keys: Callable[[Node], list[Key]]) -> tuple[str, Key]:
        """Draw a node and one of its keys."""
        return data.draw(st.sampled_from([(name, key) for name, node in self.nodes.items() for key in keys(node)]))

    @precondition(lambda self: any(node.misses for node in self.nodes.values()))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """All callers of a node give up."""
        name, key = data.draw(
            st.sampled_from([(name, key) for name, node in self.nodes.items() for key in sorted(node.misses)])
        )
        self.nodes[name].misses.discard(key)
        self.send(MissWithdrawn(name, key))

    @precondition(lambda self: any(node.listed for node in self.nodes.values()))
    @rule(data=st.data(), told=st.booleans())
    def evict(self, data: st.DataObject, told: bool) -> None:
        """A node loses a version, and says so or does not."""
        name, key = data.draw(
            st.sampled_from([(name, key) for name, node in self.nodes.items() for key in sorted(node.listed)])
        )
        version = self.nodes[name].listed.pop(key)
        if told:
            self.send(Dropped(name, key, version))
        else:
            self.evicted.add((name, key))

    def busy(self, ignored: bool = False) -> list[Order]:
        """All orders that nodes carry out."""
        return [order for node in self.nodes.values() for order in (node.ignored if ignored else node.orders).values()]

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def carry_out(self, data: st.DataObject) -> None:
        """An order is carried out."""
        self.answer(data.draw(st.sampled_from(self.busy())))

    def answer(self, order: Order) -> None:
        """Do what an order says, and answer it."""
        node = self.nodes[order.node]
        node.orders.pop(order.id, None)
        node.ignored.pop(order.id, None)
        if isinstance(order, (Build, BuildCandidate)):
            self.builds += 1
            version = Version(order.number, f"d{self.builds}")
            if isinstance(order, Build):
                self.serve(node, order.key, version)
            else:
                node.candidates.add((order.key, version))
            self.send(Built(order, version.digest, 100))
            return
        if isinstance(order, Fetch):
            source = self.nodes.get(order.source)
            if source is None or not source.has(order.key, order.version):
                self.send(OrderFailed(order, "it is not there", Blame.SOURCE))
                return
            if order.candidate:
                node.candidates.add((order.key, order.version))
            else:
                self.serve(node, order.key, order.version)
        elif isinstance(order, ChangeOver):
            if not node.has(order.key, order.version):
                self.send(OrderFailed(order, "there is no candidate", Blame.NODE))
                return
            self.serve(node, order.key, order.version)
        else:
            node.listed.pop(order.key, None)
            node.candidates = {(key, version) for key, version in node.candidates if key != order.key}
            node.orders = {
                number: other
                for number, other in node.orders.items()
                if not (isinstance(other, Fetch) and other.key == order.key and other.id < order.id)
            }
        self.send(Done(order))

    def serve(self, node: Node, key: Key, version: Version) -> None:
        """Make a version current at a node, which answers its misses."""
        node.listed[key] = version
        self.forget_candidate(node, key, version)
        node.misses.discard(key)

    def forget_candidate(self, node: Node, key: Key, version: Version) -> None:
        """A version is known by its digest."""
        node.candidates = {one for one in node.candidates if (one[0], one[1].digest) != (key, version.digest)}

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), blame=st.sampled_from(Blame))
    def fail(self, data: st.DataObject, blame: Blame) -> None:
        """An order fails."""
        order = data.draw(st.sampled_from(self.busy()))
        del self.nodes[order.node].orders[order.id]
        if isinstance(order, Build):
            self.nodes[order.node].misses.discard(order.key)  # its run has failed there
        elif (
            (blame is Blame.ENDPOINT and not isinstance(order, BuildCandidate))
            or (blame is Blame.SOURCE and not isinstance(order, Fetch))
            or (blame is Blame.RELAY and not (isinstance(order, Fetch) and order.relay))
        ):
            blame = Blame.NODE
        self.send(OrderFailed(order, "it failed", blame))

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def ignore(self, data: st.DataObject) -> None:
        """A node says nothing about an order any more."""
        order = data.draw(st.sampled_from(self.busy()))
        node = self.nodes[order.node]
        node.ignored[order.id] = node.orders.pop(order.id)
        if isinstance(order, Build):
            node.misses.discard(order.key)  # its callers have given up

    @precondition(lambda self: self.busy(ignored=True))
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        """And answers it after all."""
        order = data.draw(st.sampled_from(self.busy(ignored=True)))
        node = self.nodes[order.node]
        if isinstance(order, (Build, BuildCandidate)):
            self.answer(order)
        else:
            del node.ignored[order.id]
            self.send(OrderFailed(order, "it was late", Blame.NODE))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), key=st.sampled_from(KEYS), payload=st.sampled_from([b"1", b"2"]))
    def refresh(self, data: st.DataObject, key: Key, payload: bytes) -> None:
        """Somebody asks for a new version."""
        asker = data.draw(st.sampled_from(sorted(self.nodes)))
        self.requests += 1
        self.open[f"r{self.requests}"] = asker
        self.send(RefreshRequested(asker, f"r{self.requests}", key.endpoint, key.cache_key, payload, key))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def invalidate(self, data: st.DataObject, key: Key) -> None:
        """Somebody invalidates a call, everywhere."""
        asker = data.draw(st.sampled_from(sorted(self.nodes)))
        self.requests += 1
        self.open[f"r{self.requests}"] = asker
        self.send(InvalidationRequested(asker, f"r{self.requests}", key.endpoint, key.cache_key))

    @rule(seconds=st.sampled_from([1, 10, 40]))
    def wait(self, seconds: int) -> None:
        """Time passes, and nodes say that they go on."""
        for _ in range(seconds):
            self.now += 1
            for name, node in list(self.nodes.items()):
                if node.orders:
                    self.send(Advanced(name, dict.fromkeys(node.orders, 0)))
            for decision in self.directory.tick(self.now):
                self.receive(decision)

    @rule(all_known=st.booleans())
    def restart(self, all_known: bool) -> None:
        """The directory is restarted, and learns from the nodes what there is."""
        self.first += 1_000_000
        expected = sorted(self.nodes) if all_known else []
        self.directory = Directory(self.rules_of, now=self.now, expected=expected, first_order=self.first)
        self.open.clear()
        for name in sorted(self.nodes):
            self.state(name)

    # What holds at all times.

    @invariant()
    def one_node_builds_a_key(self) -> None:
        """Apart from those about whose orders nothing is heard."""
        if hasattr(self, "first"):
            builds = Counter(o.key for o in self.busy() if isinstance(o, (Build, BuildCandidate)) and o.id >= self.first)
            assert all(count == 1 for count in builds.values()), builds

    @invariant()
    def nobody_serves_more_than_the_fan_out(self) -> None:
        """Of the transfers that this directory has ordered."""
        if hasattr(self, "first"):
            served = Counter(o.source for o in self.busy() + self.busy(ignored=True) if isinstance(o, Fetch) and self.known(o))
            assert all(count <= self.rules_of.fan_out for count in served.values()), served

    def known(self, order: Order) -> bool:
        """Whether the directory still waits for the answer."""
        return order.id in self.directory._works

    def teardown(self) -> None:
        """All failures end: everybody is answered, and all nodes that have a key have the same version."""
        if not hasattr(self, "first"):
            return
        for name, key in sorted(self.evicted):
            self.nodes[name].misses.add(key)
            self.send(Missed(name, key))
        self.evicted.clear()
        for node in self.nodes.values():
            node.ignored.clear()
        for _ in range(14):
            for _ in range(1000):
                if not (busy := self.busy()):
                    break
                self.answer(busy[0])
            else:
                pytest.fail("orders without an end")
            self.wait(40)
        assert {name: node.misses for name, node in self.nodes.items() if node.misses} == {}
        assert self.open == {}
        for key in KEYS:
            assert len({node.listed[key].digest for node in self.nodes.values() if key in node.listed}) <= 1
        assert not any(node.candidates for node in self.nodes.values())
        status: dict[str, Any] = self.directory.status()
        assert [found for found in status["keys"] if found["waiting"] or found["left_out"] or found["refreshing"]] == []


def _is_fetch_of(order: Order, other: Fetch | Abandon) -> bool:
    return isinstance(order, Fetch) and (order.key, order.version.digest) == (other.key, other.version.digest)


class RelayingModel(DirectoryModel):
    """The same, where nodes that receive a version send it on."""

    relay = True


TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(stateful_step_count=40, deadline=None)
TestRelayingModel = RelayingModel.TestCase
TestRelayingModel.settings = settings(stateful_step_count=40, deadline=None)
