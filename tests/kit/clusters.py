"""Nodes of a cluster without processes: they carry out what a directory orders, when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shared_rpc.cluster.directory import Directory, Rules
from shared_rpc.cluster.orders import (
    Abandon,
    Answer,
    Blame,
    Build,
    BuildCandidate,
    Built,
    Decision,
    Done,
    FailMisses,
    Fetch,
    Group,
    Holding,
    InvalidationRequested,
    Key,
    Missed,
    NodeFacts,
    NodeJoined,
    NodeLeft,
    Order,
    OrderFailed,
    RefreshRequested,
)

GROUP = Group("f1", "cpu", "3.11", "2.13.0", "0.1.0")
KEY = Key("load_model", "load_model()", GROUP)


class Cluster:
    """A directory, and what it has ordered and nobody has answered yet."""

    def __init__(self, *nodes: str, expected: Iterable[str] = (), **rules: Any) -> None:
        self.now = 100.0
        self.rules = Rules(**rules)
        self.directory = Directory(self.rules, now=self.now, expected=expected)
        self.orders: list[Order] = []
        self.notices: list[Decision] = []
        for node in nodes:
            self.join(node)

    def handle(self, event: Any) -> list[Decision]:
        """Hand an event in, and keep what comes out."""
        return self._keep(self.directory.handle(event, self.now))

    def wait(self, seconds: float) -> list[Decision]:
        """Let time pass, a second at a time."""
        came: list[Decision] = []
        for _ in range(round(seconds)):
            self.now += 1
            came += self._keep(self.directory.tick(self.now))
        return came

    def _keep(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            if isinstance(decision, Order):
                self.orders = [order for order in self.orders if not _replaced(order, decision)] + [decision]
            else:
                self.notices.append(decision)
                self.orders = [order for order in self.orders if not _abandoned(order, decision)]
        return decisions

    def join(self, node: str, *holdings: Holding, host: str = "", misses: Iterable[Key] = (), **facts: Any) -> list[Decision]:
        """Have a node state what it holds; it is alone on its host if that has no name."""
        known = NodeFacts(host or node, **facts)
        return self.handle(NodeJoined(node, known, holdings, tuple(misses)))

    def lose(self, node: str) -> list[Decision]:
        """Lose a node, and what it was to do."""
        self.orders = [order for order in self.orders if order.node != node]
        return self.handle(NodeLeft(node))

    def miss(self, *nodes: str, key: Key = KEY) -> None:
        """Have nodes call what they do not hold."""
        for node in nodes:
            self.handle(Missed(node, key))

    def refresh(self, node: str, request: str = "r1", payload: bytes = b"", key: Key = KEY) -> list[Decision]:
        """Have a node ask for a new version."""
        return self.handle(RefreshRequested(node, request, key.endpoint, key.cache_key, payload, key))

    def invalidate(self, node: str, request: str = "i1", key: Key = KEY) -> list[Decision]:
        """Have a node ask for an invalidation."""
        return self.handle(InvalidationRequested(node, request, key.endpoint, key.cache_key))

    def order(self, kind: type[Order], node: str | None = None) -> Any:
        """Return the only unanswered order of that kind, for that node."""
        (order,) = self.ordered(kind, node)
        return order

    def ordered(self, kind: Any, node: str | None = None) -> list[Any]:
        """Return the unanswered orders of a kind."""
        return [order for order in self.orders if isinstance(order, kind) and node in (None, order.node)]

    def answer(self, order: Order, digest: str = "", nbytes: int = 1000) -> list[Decision]:
        """Carry an order out."""
        self.orders.remove(order)
        if isinstance(order, (Build, BuildCandidate)):
            return self.handle(Built(order, digest or f"d{order.number}", nbytes))
        return self.handle(Done(order))

    def fail(self, order: Order, blame: Blame, error: str = "it did not work") -> list[Decision]:
        """Fail an order."""
        self.orders.remove(order)
        return self.handle(OrderFailed(order, error, blame))

    def carry_out(self, unless: Callable[[Order], bool] = lambda order: False) -> None:
        """Carry out all orders, and those that follow from them, but some."""
        while order := next((order for order in self.orders if not unless(order)), None):
            self.answer(order)

    def noticed(self, kind: Any) -> list[Any]:
        """Return the notices of a kind, of all time."""
        return [notice for notice in self.notices if isinstance(notice, kind)]

    @property
    def answers(self) -> list[Answer]:
        """Answers to requests."""
        return self.noticed(Answer)

    @property
    def failed(self) -> dict[str, str]:
        """Errors that the callers of each node got."""
        return {notice.node: notice.error for notice in self.noticed(FailMisses)}

    def versions(self, key: Key = KEY) -> dict[str, int]:
        """Return the number of the version that is current at each node."""
        (status,) = [found for found in self.directory.status()["keys"] if _is(found, key)]
        return dict(status["nodes"])

    def status(self, key: Key = KEY) -> dict[str, Any]:
        """Return the status of a key."""
        (status,) = [found for found in self.directory.status()["keys"] if _is(found, key)]
        return dict(status)


def _is(status: dict[str, Any], key: Key) -> bool:
    fields = {name: getattr(key.group, name) for name in key.group.__struct_fields__}
    return (status["endpoint"], status["cache_key"], status["group"]) == (key.endpoint, key.cache_key, fields)


def _abandoned(order: Order, by: Decision) -> bool:
    """Whether it is a transfer that is to be given up."""
    same = isinstance(order, Fetch) and isinstance(by, Abandon)
    return same and (order.node, order.key, order.version) == (by.node, by.key, by.version)


def _replaced(order: Order, by: Order) -> bool:
    """Whether it is a transfer that another one replaces."""
    same = isinstance(order, Fetch) and isinstance(by, Fetch)
    return same and (order.node, order.key, order.version) == (by.node, by.key, by.version)
