"""Directory of a cluster: who has which version of what, who builds, who sends it to whom, and when all change over.

A state machine without I/O, clock or threads: :meth:`Directory.handle` takes an event and the time and returns decisions
(:mod:`shared_rpc.cluster.orders`), :meth:`Directory.tick` is called about once a second. Rules:

- One node at a time builds a key; whoever asked first. The others wait, and are told nothing until there is something to get.
- A builder that is lost, or that fails for reasons of its own, is replaced by the next node that waits, ``builders`` times in
  all. An exception of the endpoint goes to all who wait, and the next call tries anew.
- A node sends to ``fan_out`` others at a time. A node that has received a version sends it on, so the sources grow as a tree;
  with ``relay`` it sends each part on that it has.
- A source that is lost or has not the bytes is replaced by another one. After ``transfers`` attempts the node is left out. One
  that gives up receiving, and has relayed, is replaced too, and is not to blame: what was to blame it reports itself.
- A refresh has two phases. One node builds a candidate, and all that hold the key receive it; then all promote it. A node that
  fails or takes longer than ``prepare_timeout`` is left out and named; it gets the current version as soon as it can.
- Refreshes of a key come one after another. What was built later is newer: the highest number is current.
- What a node holds is what it states. The directory keeps nothing that the nodes could not state again, so that it can be
  restarted; meanwhile nobody builds, until all ``expected`` nodes have stated what they hold, or ``recovery`` seconds passed.

State is settled, key by key, after each event: what is missing is derived from what is known, not from the kind of event.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

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
    Invalidate,
    InvalidationRequested,
    Key,
    KeyResult,
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

__all__ = ["Directory", "Rules"]


#: Versions of a key whose numbers are remembered.
_REMEMBERED = 32


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Numbers of the rules. Times are in seconds.

    :param fan_out: transfers that a node serves at a time.
    :param relay: whether a node that is still receiving a version sends on the parts that it has. Its agent must be able to:
        it is asked for parts that have not arrived, and answers when they have.
    :param slow: how much more slowly than most others a node has to receive to be called slow.
    :param patience: how many times longer than most others a node may take to receive the candidate of a refresh; not less than
        ``patience_least``.
    :param silence: a node that says nothing about an order for so long loses it.
    :param report_every: how often agents report that they go on.
    :param prepare_timeout: how long a node may take to receive the candidate of a refresh, from the first byte.
    :param promote_timeout: how long a node may take to promote, or to invalidate.
    :param retry_after: until a node that was left out is tried again; twice as long after each failure, up to ``retry_most``.
    :param builders: nodes that may fail to build a key, one after the other, until all who wait get the error.
    :param transfers: attempts to get a version to a node.
    :param recovery: how long a directory that was restarted waits for the nodes to state what they hold.
    :param forget_after: how long a key that nobody has and nobody wants is remembered.
    """

    fan_out: int = 2
    relay: bool = False
    slow: float = 3.0
    patience: float = 3.0
    patience_least: float = 10.0
    silence: float = 30.0
    report_every: float = 2.0
    prepare_timeout: float = 600.0
    promote_timeout: float = 30.0
    retry_after: float = 5.0
    retry_most: float = 300.0
    builders: int = 3
    transfers: int = 5
    recovery: float = 10.0
    forget_after: float = 3600.0


@dataclass(eq=False, slots=True)
class _Work:
    """An order that has not been answered: when it was given, the last sign of life, and the bytes that have arrived."""

    order: Order
    since: float
    heard: float
    nbytes: int = 0
    #: Bytes a second between the last two signs of life; None before there were any.
    rate: float | None = None


@dataclass(eq=False, slots=True)
class _Member:
    """A node. ``orders`` are those it carries out, ``serving`` the transfers it is the source of."""

    name: str
    facts: NodeFacts
    joined_at: float
    heard_at: float
    orders: dict[int, _Work] = field(default_factory=dict)
    serving: dict[int, _Work] = field(default_factory=dict)
    #: Distributions in which it is a source.
    sources_of: dict[int, _Distribution] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    movers: Counter[str] = field(default_factory=Counter)
    #: Transfers from it that failed or were slow, until it is found to be good again.
    demerits: int = 0


@dataclass(eq=False, slots=True)
class _Distribution:
    """The spread of one version of a key: who has it, who receives it, who is to.

    ``free`` is a heap of sources that had room for a transfer when they were put there: ``(demerits, depth, number, name)``.
    """

    key: Key
    version: Version
    nbytes: int
    holders: dict[str, None] = field(default_factory=dict)
    pending: OrderedDict[str, None] = field(default_factory=OrderedDict)
    active: dict[str, _Work] = field(default_factory=dict)
    #: Sources from which a node could not get it, and when its first attempt began.
    tried: dict[str, set[str]] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    started: dict[str, float] = field(default_factory=dict)
    #: Seconds that the transfers took that have ended.
    taken: dict[str, float] = field(default_factory=dict)
    free: list[tuple[int, int, int, str]] = field(default_factory=list)
    #: Bytes that had arrived when a node's transfer was ended; the first source that was too slow for it.
    arrived: dict[str, int] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    #: Transfers between a node and one that has all the bytes; 0 for the latter.
    depths: dict[str, int] = field(default_factory=dict)

    def source_of(self, node: str) -> str | None:
        """Return the node from which another one is receiving it, None if it receives nothing."""
        work = self.active.get(node)
        return work.order.source if work is not None and isinstance(work.order, Fetch) else None

    def comes_from(self, node: str, other: str) -> bool:
        """Return whether what a node is receiving comes, over however many others, from another one."""
        source: str | None = node
        while source is not None and source != other:
            source = None if source in self.holders else self.source_of(source)
        return source == other


@dataclass(eq=False, slots=True)
class _LeftOut:
    """A node without the current version, the reason, and the failures in a row."""

    reason: str
    since: float
    failures: int = 1


@dataclass(eq=False, slots=True)
class _Refresh:
    """One refresh of one key. ``missing`` are the nodes that have not got the candidate, ``builder`` builds it."""

    requests: list[str]
    asker: str
    payload: bytes
    may_build: bool
    number: int = 0
    builder: _Work | None = None
    failed: dict[str, str] = field(default_factory=dict)
    distribution: _Distribution | None = None
    missing: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    committed: bool = False
    promoting: set[str] = field(default_factory=set)
    promoted: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Request:
    """A request of a user: the keys that are not settled, and the results of the others."""

    asker: str
    open: set[Key]
    results: list[KeyResult] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Invalidation:
    """Nodes that have not confirmed that a key is invalid, and what came of the others."""

    request: str
    waiting: set[str]
    done: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Entry:
    """All that is known of a key.

    ``listed`` has the version that is current at each node, ``waiting`` the nodes whose misses are not answered, in order.
    ``current`` is the distribution of the cluster's current version. Numbers below ``valid_from`` were invalidated.
    """

    key: Key
    listed: dict[str, Version] = field(default_factory=dict)
    waiting: OrderedDict[str, None] = field(default_factory=OrderedDict)
    current: _Distribution | None = None
    build: _Work | None = None
    failures: dict[str, str] = field(default_factory=dict)
    refresh: _Refresh | None = None
    queue: deque[_Refresh] = field(default_factory=deque)
    invalidations: list[_Invalidation] = field(default_factory=list)
    left_out: dict[str, _LeftOut] = field(default_factory=dict)
    #: Nodes that have not confirmed an invalidation, with the attempts.
    invalid: Counter[str] = field(default_factory=Counter)
    #: Candidates that were stated before it was known what is current.
    orphans: dict[str, Version] = field(default_factory=dict)
    next_number: int = 1
    valid_from: int = 0
    #: Numbers of the latest versions, by their digests: an agent that was restarted knows the bytes alone.
    numbers: dict[str, int] = field(default_factory=dict)
    #: Bytes of the latest version that was seen.
    nbytes: int = 0
    touched_at: float = 0.0

    def distributions(self) -> Iterator[_Distribution]:
        """Yield what is being spread: the current version, and the candidate of a refresh."""
        if self.current is not None:
            yield self.current
        if self.refresh is not None and self.refresh.distribution is not None and not self.refresh.committed:
            yield self.refresh.distribution

    def distribution(self, version: Version) -> _Distribution | None:
        """Return the distribution of a version, None if it is not being spread."""
        return next((found for found in self.distributions() if found.version == version), None)

    @property
    def idle(self) -> bool:
        """Whether nobody has it and nobody wants it."""
        return not (
            self.listed or self.waiting or self.build or self.refresh or self.queue or self.invalidations or self.current
        )


class Directory:
    """Plan of a cluster.

    :param expected: nodes that a directory which was restarted waits for, before anybody builds.
    :param first_order: the first order's id: higher than any that an earlier directory gave, such as microseconds since 1970.
    """

    def __init__(self, rules: Rules | None = None, *, now: float, expected: Iterable[str] = (), first_order: int = 1) -> None:
        self.rules = rules if rules is not None else Rules()
        self._now = now
        self._expected = set(expected)
        self._recovered_at = now + self.rules.recovery if self._expected else now
        self._ids = itertools.count(first_order)
        self._sequence = itertools.count()
        self._members: dict[str, _Member] = {}
        self._hosts: dict[str, dict[str, None]] = {}
        self._entries: dict[Key, _Entry] = {}
        self._works: dict[int, _Work] = {}
        self._requests: dict[str, _Request] = {}
        #: Nodes that were left out, by the time of the next attempt.
        self._resting: list[tuple[float, int, Key, str]] = []
        self._asked: dict[str, float] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._touched: dict[Key, None] = {}
        self._decisions: list[Decision] = []
        self._events: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._moved = 0
        self._movers: Counter[str] = Counter()
        self._handlers: dict[type, Callable[[Any], None]] = {
            NodeJoined: self._joined,
            NodeLeft: self._left,
            Missed: self._missed,
            MissWithdrawn: self._withdrawn,
            Built: self._built,
            Done: self._done,
            OrderFailed: self._failed,
            Advanced: self._advanced,
            Dropped: self._dropped,
            RefreshRequested: self._refresh_requested,
            InvalidationRequested: self._invalidation_requested,
        }

    # What drivers call.

    def handle(self, event: ClusterEvent, now: float) -> list[Decision]:
        """Take an event in.

        :param now: seconds of any clock that does not go back.
        """
        self._now = max(now, self._now)
        self._events[type(event).__name__] += 1
        if event.node not in self._members and not isinstance(event, (NodeJoined, NodeLeft)):
            self._ask_to_rejoin(event.node)
        else:
            if not isinstance(event, NodeLeft) and event.node in self._members:
                self._members[event.node].heard_at = self._now
            self._handlers[type(event)](event)
        return self._settled()

    def tick(self, now: float) -> list[Decision]:
        """Do what time has made necessary: give silent nodes' orders to others, try again those that were left out."""
        self._now = max(now, self._now)
        if self._expected and self._now >= self._recovered_at:
            self._expected.clear()
            self._recovered()
        for work in list(self._works.values()):
            if work.order.id in self._works:
                self._check_time(work)
        for entry in self._entries.values():
            for distribution in list(entry.distributions()):
                self._check_rates(entry, distribution)
            if entry.refresh is not None:
                self._check_refresh(entry, entry.refresh)
        while self._resting and self._resting[0][0] <= self._now:
            _, _, key, node = heapq.heappop(self._resting)
            self._try_again(key, node)
        for key, entry in list(self._entries.items()):
            if entry.idle and self._now - entry.touched_at > self.rules.forget_after:
                del self._entries[key]
        return self._settled()

    @property
    def recovering(self) -> bool:
        """Whether nodes are still expected to state what they hold."""
        return bool(self._expected)

    # Nodes.

    def _joined(self, event: NodeJoined) -> None:
        if event.node in self._members:
            self._lose(event.node, "its agent was restarted", {order.id for order in event.orders})
        member = self._members.get(event.node)
        if member is None:
            member = self._members[event.node] = _Member(event.node, event.facts, self._now, self._now)
        self._leave_host(member)
        member.facts = event.facts
        self._hosts.setdefault(event.facts.host, {})[event.node] = None
        self._gone.pop(event.node, None)
        self._asked.pop(event.node, None)
        for key in event.misses:
            self._entry(key).waiting.setdefault(event.node)
        for order in event.orders:
            if order.id not in member.orders:
                self._take_up(order)
        for holding in event.holdings:
            self._hold(event.node, holding)
        for key in event.misses:
            self._want(self._entry(key), event.node)
        if event.node in self._expected:
            self._expected.discard(event.node)
            if not self._expected:
                self._recovered()

    def _take_up(self, order: Order) -> None:
        """Note a build that an earlier directory ordered. Its transfers are ordered anew, and go on where they are."""
        entry = self._entry(order.key)
        if isinstance(order, (Build, BuildCandidate)) and entry.build is None:
            entry.build = self._note(order)
            entry.next_number = max(entry.next_number, order.number + 1)

    def _left(self, event: NodeLeft) -> None:
        self._asked.pop(event.node, None)
        if event.node in self._expected:
            self._expected.discard(event.node)
            if not self._expected:
                self._recovered()
        if event.node not in self._members:
            return
        self._lose(event.node, event.reason, set())
        member = self._members.pop(event.node)
        self._leave_host(member)
        self._gone[event.node] = event.reason
        while len(self._gone) > 1000:
            self._gone.popitem(last=False)
        for request in [name for name, request in self._requests.items() if request.asker == event.node]:
            del self._requests[request]

    def _leave_host(self, member: _Member) -> None:
        nodes = self._hosts.get(member.facts.host, {})
        nodes.pop(member.name, None)
        if not nodes:
            self._hosts.pop(member.facts.host, None)

    def _lose(self, node: str, reason: str, kept: set[int]) -> None:
        """Forget what a node has, wants and does, apart from the orders that it still carries out."""
        member = self._members[node]
        for entry in self._entries.values():
            if entry.waiting.pop(node, ()) is None:
                self._touch(entry)
            entry.orphans.pop(node, None)
            entry.left_out.pop(node, None)
            entry.invalid.pop(node, None)
            if node in entry.listed:
                self._unlist(entry, node)
            for distribution in list(entry.distributions()):
                if node in distribution.holders:
                    self._no_longer_holds(entry, distribution, node)
                distribution.pending.pop(node, None)
                self._no_source_any_more(distribution, node)
            if entry.refresh is not None and node in entry.refresh.missing:
                self._leave_out_of_refresh(entry, entry.refresh, node, reason)
        for work in [work for work in member.orders.values() if work.order.id not in kept]:
            self._lost_order(work, reason)

    def _ask_to_rejoin(self, node: str) -> None:
        if self._now - self._asked.get(node, float("-inf")) >= self.rules.report_every:
            self._asked[node] = self._now
            self._send(Rejoin(node))

    def _recovered(self) -> None:
        for entry in self._entries.values():
            for node, version in entry.orphans.items():
                self._candidate(entry, node, version)
            entry.orphans.clear()
            self._touch(entry)

    # Holdings.

    def _hold(self, node: str, holding: Holding) -> None:
        """Take a node's word for what it has."""
        entry = self._entry(holding.key)
        version = self._recognised(entry, holding.version)
        entry.next_number = max(entry.next_number, version.number + 1)
        if version.number < entry.valid_from and holding.candidate:
            self._send(Abandon(node, entry.key, version))
        elif version.number < entry.valid_from:
            self._order_invalidation(entry, node)
        elif not holding.candidate:
            self._list(entry, node, version, holding.nbytes)
        elif self._expected:
            entry.orphans[node] = version
        else:
            self._candidate(entry, node, version)

    def _recognised(self, entry: _Entry, version: Version) -> Version:
        """Return a version with its number, where its digest is known; and learn the number of one known by digest alone."""
        if version.number == 0:
            return Version(entry.numbers.get(version.digest, 0), version.digest)
        entry.numbers[version.digest] = max(version.number, entry.numbers.pop(version.digest, 0))
        while len(entry.numbers) > _REMEMBERED:
            del entry.numbers[next(iter(entry.numbers))]
        known = [found.version for found in entry.distributions()] + list(entry.listed.values())
        if (unnumbered := Version(0, version.digest)) in known:
            for node in [node for node, found in entry.listed.items() if found == unnumbered]:
                entry.listed[node] = version
            if entry.current is not None and entry.current.version == unnumbered:
                entry.current.version = version
        return version

    def _list(self, entry: _Entry, node: str, version: Version, nbytes: int) -> None:
        """Note that a version is current at a node, and what that means for the cluster."""
        before, entry.listed[node] = entry.listed.get(node), version
        if entry.current is not None and before == entry.current.version != version and node in entry.current.holders:
            self._no_longer_holds(entry, entry.current, node)
        del entry.invalid[node]
        entry.nbytes = nbytes
        entry.waiting.pop(node, None)
        self._touch(entry)
        if entry.current is None or version > entry.current.version:
            self._make_current(entry, _Distribution(entry.key, version, nbytes))
        assert entry.current is not None
        if entry.current.version == version:
            entry.left_out.pop(node, None)
            self._holds(entry.current, node)
        else:
            self._want(entry, node)

    def _candidate(self, entry: _Entry, node: str, version: Version) -> None:
        """Use a candidate that a node has, or have it abandoned."""
        distribution = entry.distribution(version)
        if distribution is None:
            self._send(Abandon(node, entry.key, version))
            return
        self._holds(distribution, node)
        if distribution is entry.current:
            self._order_promotion(entry, node)
        elif entry.refresh is not None:
            entry.refresh.missing.discard(node)
        self._touch(entry)

    def _make_current(self, entry: _Entry, distribution: _Distribution) -> None:
        """Replace the cluster's current version: all nodes that list or await the key are to have the new one."""
        old, entry.current = entry.current, distribution
        if old is not None:
            self._stop(entry, old)
        for node in itertools.chain(entry.waiting, entry.listed):
            self._want(entry, node)

    def _want(self, entry: _Entry, node: str) -> None:
        """Have a node receive the current version, unless it has it, receives it, or rests after a failure."""
        current = entry.current
        if current is None or node not in self._members or node in current.active:
            self._touch(entry)
        elif entry.build is not None and isinstance(entry.build.order, Build) and entry.build.order.node == node:
            pass  # its own run answers its callers
        elif node in current.holders:
            if entry.listed.get(node) != current.version:
                self._order_promotion(entry, node)
        elif node in entry.waiting or (
            entry.listed.get(node, current.version) != current.version and node not in entry.left_out
        ):
            current.pending.setdefault(node)
            self._touch(entry)

    def _unlist(self, entry: _Entry, node: str) -> None:
        del entry.listed[node]
        self._touch(entry)

    def _holds(self, distribution: _Distribution, node: str) -> None:
        """Note that a node is a source of a version from now on."""
        distribution.pending.pop(node, None)
        distribution.holders[node] = None
        distribution.depths[node] = 0
        member = self._members[node]
        member.sources_of[id(distribution)] = distribution
        self._offer(distribution, member)

    def _no_longer_holds(self, entry: _Entry, distribution: _Distribution, node: str) -> None:
        """Note that a node has lost a version; who was receiving it from there gets another source."""
        del distribution.holders[node]
        self._touch(entry)
        if distribution.holders:
            self._no_source_any_more(distribution, node)
            return
        if entry.refresh is not None and entry.refresh.distribution is distribution and not entry.refresh.committed:
            self._end_refresh(entry, entry.refresh, f"the candidate was lost: no node has it any more, the last one was {node}")
        elif distribution is entry.current:
            self._fall_back(entry, distribution)

    def _no_source_any_more(self, distribution: _Distribution, node: str) -> None:
        """Have those who were receiving a version from a node receive the rest from others."""
        member = self._members[node]
        member.sources_of.pop(id(distribution), None)
        for work in list(member.serving.values()):
            order = work.order
            if order.key == distribution.key and distribution.active.get(order.node) is work:
                self._put_back(distribution, order.node)

    def _fall_back(self, entry: _Entry, lost: _Distribution) -> None:
        """Find the newest version that is left, now that nobody has the current one."""
        self._stop(entry, lost)
        entry.current = None
        version = max(entry.listed.values(), default=None)
        if version is not None:
            self._make_current(entry, _Distribution(entry.key, version, lost.nbytes))
            assert entry.current is not None
            for node in [node for node, listed in entry.listed.items() if listed == version]:
                self._holds(entry.current, node)

    def _stop(self, entry: _Entry, distribution: _Distribution) -> None:
        """End the spread of a version: transfers are abandoned, and its holders are sources no more."""
        for node in distribution.holders:
            self._members[node].sources_of.pop(id(distribution), None)
            if entry.listed.get(node) != distribution.version:
                self._send(Abandon(node, entry.key, distribution.version))
        for node, work in distribution.active.items():
            self._members[node].sources_of.pop(id(distribution), None)
            self._close(work)
            self._send(Abandon(node, entry.key, distribution.version))
        for node in distribution.pending:  # one that waits for another source has relayed until then
            self._members[node].sources_of.pop(id(distribution), None)
        distribution.active.clear()
        distribution.pending.clear()

    # Misses and builds.

    def _missed(self, event: Missed) -> None:
        entry = self._entry(event.key)
        entry.waiting.setdefault(event.node)
        if event.node in entry.listed:  # it was evicted there, and the word of it is behind
            self._has_nothing(entry, event.node)
        entry.left_out.pop(event.node, None)
        self._want(entry, event.node)
        self._touch(entry)

    def _has_nothing(self, entry: _Entry, node: str) -> None:
        """Note that a node has no object of a key any more; a candidate it may have."""
        version = entry.listed.get(node)
        if version is not None:
            self._unlist(entry, node)
        if entry.current is not None and entry.current.version == version and node in entry.current.holders:
            self._no_longer_holds(entry, entry.current, node)

    def _withdrawn(self, event: MissWithdrawn) -> None:
        entry = self._entry(event.key)
        entry.waiting.pop(event.node, None)
        current = entry.current
        if current is not None and event.node not in entry.listed and current.pending.pop(event.node, ()) is None:
            self._no_source_any_more(current, event.node)

    def _dropped(self, event: Dropped) -> None:
        entry = self._entry(event.key)
        version = self._recognised(entry, event.version)
        if entry.listed.get(event.node) == version:
            self._unlist(entry, event.node)
        distribution = entry.distribution(version)
        if distribution is not None and event.node in distribution.holders:
            self._no_longer_holds(entry, distribution, event.node)
            if entry.refresh is not None and entry.refresh.distribution is distribution and not entry.refresh.committed:
                distribution.pending.setdefault(event.node)
                entry.refresh.missing.add(event.node)

    def _built(self, event: Built) -> None:
        order, entry = event.order, self._entry(event.order.key)
        work = self._works.get(order.id)
        if work is not None:
            self._close(work)
        if entry.build is work and work is not None:
            entry.build = None
            entry.failures.clear()
        version = self._recognised(entry, Version(order.number, event.digest))
        refresh = entry.refresh
        self._touch(entry)
        if isinstance(order, Build):
            self._hold(order.node, Holding(order.key, version, event.nbytes))
            entry.waiting.pop(order.node, None)  # its own run answered it, be it valid or not
        elif refresh is not None and work is not None and refresh.builder is work:
            refresh.builder = None
            refresh.distribution = _Distribution(order.key, version, event.nbytes)
            refresh.missing.discard(order.node)
            for node in sorted(refresh.missing):
                refresh.distribution.pending[node] = None
            self._holds(refresh.distribution, order.node)
        else:
            self._send(Abandon(order.node, order.key, version))

    # Answers to orders.

    def _done(self, event: Done) -> None:
        order, entry = event.order, self._entry(event.order.key)
        work = self._works.get(order.id)
        if work is not None:
            self._close(work)
        self._touch(entry)
        if isinstance(order, Fetch):
            self._received(entry, order)
            self._movers.update(event.movers)
            self._members[order.node].movers.update(event.movers)
        elif isinstance(order, ChangeOver):
            refresh = entry.refresh
            if refresh is not None and refresh.committed and order.node in refresh.promoting:
                refresh.promoting.discard(order.node)
                refresh.promoted.append(order.node)
            distribution = entry.distribution(order.version)
            nbytes = distribution.nbytes if distribution is not None else entry.nbytes
            self._hold(order.node, Holding(order.key, order.version, nbytes))
        else:
            if work is None:  # an earlier directory ordered it, and the node has stated what it holds since
                self._has_nothing(entry, order.node)
            self._invalidated(entry, order.node, "")

    def _received(self, entry: _Entry, order: Fetch) -> None:
        self._moved += order.nbytes
        self._members[order.node].received += order.nbytes
        if (source := self._members.get(order.source)) is not None:
            source.sent += order.nbytes
        distribution = entry.distribution(order.version)
        if distribution is not None:
            if order.node in distribution.started:
                distribution.taken[order.node] = self._now - distribution.started[order.node]
            if order.node not in distribution.moved and source is not None:
                source.demerits = self._members[order.node].demerits = 0
            distribution.active.pop(order.node, None)
            distribution.tried.pop(order.node, None)
            distribution.attempts.pop(order.node, None)
        self._hold(order.node, Holding(order.key, order.version, order.nbytes, order.candidate))

    def _failed(self, event: OrderFailed) -> None:
        work = self._works.get(event.order.id)
        if work is not None:
            self._order_failed(work, event.error, event.blame, event.payload)

    def _lost_order(self, work: _Work, reason: str) -> None:
        """Give an order up whose node was lost, or says nothing."""
        self._order_failed(work, reason, Blame.NODE, b"")

    def _order_failed(self, work: _Work, error: str, blame: Blame, payload: bytes) -> None:
        order, entry = work.order, self._entry(work.order.key)
        self._close(work)
        self._touch(entry)
        if isinstance(order, (Build, BuildCandidate)):
            self._build_failed(entry, work, error, blame, payload)
        elif isinstance(order, Fetch):
            self._transfer_failed(entry, order, error, blame)
        elif isinstance(order, ChangeOver):
            self._promotion_failed(entry, order, error)
        else:
            self._invalidated(entry, order.node, error)

    def _build_failed(self, entry: _Entry, work: _Work, error: str, blame: Blame, payload: bytes) -> None:
        refresh, node = entry.refresh, work.order.node
        if refresh is not None and refresh.builder is work:
            refresh.builder = None
            refresh.failed[node] = error
            if blame is Blame.ENDPOINT:
                self._end_refresh(entry, refresh, error, payload)
        if entry.build is not work:
            return
        entry.build = None
        if isinstance(work.order, BuildCandidate):
            return  # of a refresh that has ended: nobody waits for the candidate
        entry.waiting.pop(node, None)  # its own run told it
        entry.failures[node] = error
        if blame is Blame.ENDPOINT:
            self._fail_all(entry, error, payload)
        elif len(entry.failures) >= self.rules.builders:
            named = "; ".join(f"{name}: {reason}" for name, reason in entry.failures.items())
            self._fail_all(entry, f"{entry.key.endpoint} could not be built on {len(entry.failures)} nodes: {named}")

    def _fail_all(self, entry: _Entry, error: str, payload: bytes = b"") -> None:
        for node in entry.waiting:
            self._send(FailMisses(node, entry.key, error, payload))
        entry.waiting.clear()
        entry.failures.clear()

    def _transfer_failed(self, entry: _Entry, order: Fetch, error: str, blame: Blame) -> None:
        distribution = entry.distribution(order.version)
        if distribution is None or distribution.active.pop(order.node, None) is None:
            return
        if blame in (Blame.SOURCE, Blame.RELAY):
            distribution.tried.setdefault(order.node, set()).add(order.source)
            if blame is Blame.SOURCE:
                distribution.attempts[order.node] += 1
                if (source := self._members.get(order.source)) is not None:
                    source.demerits += 1
            if distribution.attempts[order.node] < self.rules.transfers:
                distribution.pending[order.node] = None
                distribution.pending.move_to_end(order.node, last=False)
                return  # it relays what it has, and those who receive it from there wait for the rest
            error = f"{self.rules.transfers} transfers failed, the last one from {order.source}: {error}"
        self._no_source_any_more(distribution, order.node)
        self._leave_out(entry, distribution, order.node, error)

    def _leave_out(self, entry: _Entry, distribution: _Distribution, node: str, error: str) -> None:
        """Go on without a node: its callers get the error, a refresh does not wait for it, and it is tried again later."""
        distribution.attempts.pop(node, None)
        distribution.tried.pop(node, None)
        if distribution is entry.current and entry.waiting.pop(node, ()) is None:
            self._send(FailMisses(node, entry.key, error))
        if entry.refresh is not None and entry.refresh.distribution is distribution:
            self._leave_out_of_refresh(entry, entry.refresh, node, error)
        self._rest(entry, node, error)

    def _rest(self, entry: _Entry, node: str, error: str) -> None:
        if node not in entry.listed and (entry.current is None or node not in entry.current.holders):
            return
        left_out = entry.left_out.get(node)
        if left_out is None:
            left_out = entry.left_out[node] = _LeftOut(error, self._now)
        else:
            left_out.reason, left_out.failures = error, left_out.failures + 1
        self._look_again(entry, node, left_out.failures)

    def _look_again(self, entry: _Entry, node: str, failures: int) -> None:
        pause = min(self.rules.retry_after * 2 ** min(failures - 1, 16), self.rules.retry_most)
        heapq.heappush(self._resting, (self._now + pause, next(self._sequence), entry.key, node))

    def _try_again(self, key: Key, node: str) -> None:
        entry = self._entries.get(key)
        if entry is None or node not in self._members:
            return
        if node in entry.invalid and node not in entry.listed:
            self._order(Invalidate(node, entry.key, next(self._ids)))
        if node not in entry.left_out:
            return
        current = entry.current
        if current is None:  # what it was to have is lost
            del entry.left_out[node]
            return
        if entry.listed.get(node) == current.version:
            del entry.left_out[node]
        elif node in current.holders:
            self._order_promotion(entry, node)
        elif node not in entry.listed:
            del entry.left_out[node]
        elif node not in current.active:
            current.pending.setdefault(node)
            self._touch(entry)

    # Refreshes.

    def _refresh_requested(self, event: RefreshRequested) -> None:
        if event.request in self._requests:
            return
        keys = {
            key
            for key, entry in self._entries.items()
            if key.endpoint == event.endpoint and key.cache_key == event.cache_key and not entry.idle
        }
        if not keys and event.key is not None:
            keys = {event.key}
        self._open_request(event.request, event.node, keys)
        for key in sorted(keys):
            entry = self._entry(key)
            queued = next((refresh for refresh in entry.queue if refresh.payload == event.payload), None)
            if queued is not None:
                queued.requests.append(event.request)
            else:
                entry.queue.append(_Refresh([event.request], event.node, event.payload, event.key == key))
            self._touch(entry)

    def _begin_refresh(self, entry: _Entry) -> None:
        refresh = entry.refresh = entry.queue.popleft()
        refresh.number = entry.next_number
        entry.next_number += 1
        refresh.missing = set(entry.listed) or (
            {refresh.asker} if refresh.may_build and refresh.asker in self._members else set()
        )
        self._order_candidate(entry, refresh)

    def _order_candidate(self, entry: _Entry, refresh: _Refresh) -> None:
        """Choose who builds the candidate: the asker if it has the key, else who has least to do."""
        able = [node for node in refresh.missing if node not in refresh.failed]
        if not able or len(refresh.failed) >= self.rules.builders:
            named = "; ".join(f"{node}: {reason}" for node, reason in refresh.failed.items())
            self._end_refresh(entry, refresh, named or "no node of the cluster has it any more")
            return
        builder = refresh.asker if refresh.asker in able else min(able, key=self._load)
        order = BuildCandidate(builder, entry.key, next(self._ids), refresh.number, refresh.payload)
        refresh.builder = self._order(order)

    def _load(self, node: str) -> tuple[int, str]:
        member = self._members[node]
        return len(member.orders) + len(member.serving), node

    def _leave_out_of_refresh(self, entry: _Entry, refresh: _Refresh, node: str, reason: str) -> None:
        refresh.missing.discard(node)
        refresh.promoting.discard(node)
        refresh.left_out[node] = reason
        self._touch(entry)

    def _commit(self, entry: _Entry, refresh: _Refresh, distribution: _Distribution) -> None:
        """Begin the second phase: all who have the candidate promote it, and from now on it is what others get."""
        if entry.current is not None and entry.current.version > distribution.version:
            self._end_refresh(entry, refresh, "a later version became current meanwhile")
            return
        refresh.committed = True
        refresh.promoting = set(distribution.holders)
        for node, reason in refresh.left_out.items():
            if node in self._members:
                self._rest(entry, node, reason)
        self._make_current(entry, distribution)
        for node in distribution.holders:
            self._order_promotion(entry, node)

    def _order_promotion(self, entry: _Entry, node: str) -> None:
        assert entry.current is not None
        member, version = self._members[node], entry.current.version
        if not any(
            isinstance(work.order, ChangeOver) and work.order.key == entry.key and work.order.version == version
            for work in member.orders.values()
        ):
            self._order(ChangeOver(node, entry.key, next(self._ids), version))

    def _promotion_failed(self, entry: _Entry, order: ChangeOver, error: str) -> None:
        refresh = entry.refresh
        if refresh is not None and refresh.committed and order.node in refresh.promoting:
            self._leave_out_of_refresh(entry, refresh, order.node, error)
        current = entry.current
        if current is not None and current.version == order.version:
            if entry.waiting.pop(order.node, ()) is None:
                self._send(FailMisses(order.node, entry.key, error))
            self._rest(entry, order.node, error)
            left_out = entry.left_out.get(order.node)
            if left_out is not None and left_out.failures > 1 and order.node in current.holders:
                # Its candidate is of no use, whatever became of it.
                self._send(Abandon(order.node, entry.key, order.version))
                self._no_longer_holds(entry, current, order.node)
                if order.node not in entry.listed:
                    del entry.left_out[order.node]

    def _end_refresh(self, entry: _Entry, refresh: _Refresh, error: str = "", payload: bytes = b"") -> None:
        """Answer who asked for a refresh, and let the next one begin."""
        entry.refresh = None
        self._touch(entry)
        version = None
        if not error:
            assert refresh.distribution is not None
            version = refresh.distribution.version
        else:
            if refresh.builder is not None:
                entry.build = refresh.builder  # it goes on, and nobody else builds meanwhile
            if refresh.distribution is not None and not refresh.committed:
                self._stop(entry, refresh.distribution)
        result = KeyResult(entry.key, version, tuple(refresh.promoted), dict(refresh.left_out), error, payload)
        for request in refresh.requests:
            self._answer(request, result)

    # Invalidation.

    def _invalidation_requested(self, event: InvalidationRequested) -> None:
        if event.request in self._requests:
            return
        keys = {
            key
            for key, entry in self._entries.items()
            if key.endpoint == event.endpoint and event.cache_key in (None, key.cache_key) and not entry.idle
        }
        self._open_request(event.request, event.node, keys)
        for key in sorted(keys):
            self._invalidate(self._entry(key), event.request)

    def _invalidate(self, entry: _Entry, request: str) -> None:
        """Have all nodes forget a key. What is being built goes to who waits for it at that node, and to nobody else."""
        entry.valid_from = entry.next_number
        nodes = set(entry.listed)
        if entry.refresh is not None and not entry.refresh.committed and entry.refresh.distribution is not None:
            nodes |= set(entry.refresh.distribution.holders)
        if entry.refresh is not None:
            self._end_refresh(entry, entry.refresh, "the call was invalidated meanwhile")
        if entry.current is not None:
            nodes |= set(entry.current.active) | set(entry.current.holders)
            self._stop(entry, entry.current)
            entry.current = None
        for work in [
            work
            for node in nodes
            for work in self._members[node].orders.values()
            if work.order.key == entry.key and isinstance(work.order, ChangeOver)
        ]:
            self._close(work)
        entry.listed.clear()
        entry.left_out.clear()
        entry.invalidations.append(_Invalidation(request, nodes))
        for node in sorted(nodes):
            self._order_invalidation(entry, node)
        self._touch(entry)

    def _order_invalidation(self, entry: _Entry, node: str) -> None:
        entry.invalid[node] = 0
        self._order(Invalidate(node, entry.key, next(self._ids)))

    def _invalidated(self, entry: _Entry, node: str, error: str) -> None:
        """Note that a node has forgotten a key; one that could not is told again, as it goes on to serve what is invalid."""
        if not error:
            del entry.invalid[node]
        elif node in entry.invalid:
            entry.invalid[node] += 1
            self._look_again(entry, node, entry.invalid[node])
        for invalidation in entry.invalidations:
            if node in invalidation.waiting:
                invalidation.waiting.discard(node)
                if error:
                    invalidation.left_out[node] = error
                else:
                    invalidation.done.append(node)

    # Requests.

    def _open_request(self, request: str, asker: str, keys: set[Key]) -> None:
        self._requests[request] = _Request(asker, keys)
        if not keys:
            self._finish_request(request)

    def _answer(self, name: str, result: KeyResult) -> None:
        request = self._requests.get(name)
        if request is None:
            return
        request.open.discard(result.key)
        request.results.append(result)
        if not request.open:
            self._finish_request(name)

    def _finish_request(self, name: str) -> None:
        request = self._requests.pop(name)
        self._send(Answer(request.asker, name, tuple(request.results)))

    # Settling.

    def _entry(self, key: Key) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key, touched_at=self._now)
        return entry

    def _touch(self, entry: _Entry) -> None:
        self._touched[entry.key] = None

    def _settled(self) -> list[Decision]:
        while self._touched:
            key = next(iter(self._touched))
            del self._touched[key]
            self._settle(self._entry(key))
        decisions, self._decisions = self._decisions, []
        return decisions

    def _settle(self, entry: _Entry) -> None:
        """Decide what a key needs next."""
        entry.touched_at = self._now
        refresh = entry.refresh
        if refresh is not None and refresh.distribution is None and refresh.builder is None:
            self._order_candidate(entry, refresh)
        elif refresh is not None and refresh.distribution is not None and not refresh.committed and not refresh.missing:
            self._commit(entry, refresh, refresh.distribution)
        if (refresh := entry.refresh) is not None and refresh.committed and not refresh.promoting:
            self._end_refresh(entry, refresh)
        for invalidation in [found for found in entry.invalidations if not found.waiting]:
            entry.invalidations.remove(invalidation)
            result = KeyResult(entry.key, None, tuple(invalidation.done), invalidation.left_out)
            self._answer(invalidation.request, result)
        if entry.build is None and entry.refresh is None and not self._expected:
            if entry.current is None and entry.waiting:
                node = next((node for node in entry.waiting if node not in entry.failures), next(iter(entry.waiting)))
                order = Build(node, entry.key, next(self._ids), entry.next_number)
                entry.next_number += 1
                entry.build = self._order(order)
            elif entry.queue:
                self._begin_refresh(entry)
        for distribution in list(entry.distributions()):
            self._spread(entry, distribution)

    def _spread(self, entry: _Entry, distribution: _Distribution) -> None:
        """Give each node that is to receive a version a source, as long as there are sources with room."""
        passed = 0
        while len(distribution.pending) > passed:
            node = next(itertools.islice(distribution.pending, passed, None))
            source = self._source_for(distribution, node)
            if source is None:
                if not distribution.tried.get(node):
                    return
                if distribution.holders.keys() <= distribution.tried[node]:
                    distribution.tried[node].clear()  # all were tried: from the beginning
                else:
                    passed += 1
                continue
            del distribution.pending[node]
            self._order_transfer(entry, distribution, node, source)

    def _order_transfer(self, entry: _Entry, distribution: _Distribution, node: str, source: _Member) -> None:
        order = Fetch(
            node,
            entry.key,
            next(self._ids),
            distribution.version,
            distribution.nbytes,
            source.name,
            candidate=distribution is not entry.current or node not in entry.waiting,
            relay=source.name not in distribution.holders,
        )
        distribution.active[node] = work = self._order(order)
        work.nbytes = distribution.arrived.pop(node, 0)
        distribution.started.setdefault(node, self._now)
        distribution.depths[node] = distribution.depths[source.name] + 1
        source.serving[order.id] = work
        self._offer(distribution, source)
        if self.rules.relay:
            receiver = self._members[node]
            receiver.sources_of[id(distribution)] = distribution
            self._offer(distribution, receiver)

    def _source_for(self, distribution: _Distribution, node: str) -> _Member | None:
        """Choose a source with room: one of the same host, else one without failures; of relays the nearest to all bytes."""
        near = [
            name
            for name in self._hosts.get(self._members[node].facts.host, ())
            if self._is_source(distribution, self._members[name], node) and not self._members[name].demerits
        ]
        if near:
            return self._members[min(near, key=distribution.depths.__getitem__)]
        put_back, found = [], None
        while distribution.free and found is None:
            offer = heapq.heappop(distribution.free)
            member = self._members.get(offer[3])
            if member is None or not self._is_source(distribution, member):
                continue
            if offer[0] != member.demerits:  # it has its place among the others anew
                self._offer(distribution, member)
            elif not self._is_source(distribution, member, node):
                put_back.append(offer)
            elif member.demerits and self._has_better(distribution, node):
                put_back.append(offer)
                break
            else:
                found = member
        for offer in put_back:
            heapq.heappush(distribution.free, offer)
        return found

    def _has_better(self, distribution: _Distribution, node: str) -> bool:
        """Return whether there is a source without demerits, which has no room yet."""
        tried = distribution.tried.get(node, ())
        return any(
            id(distribution) in self._members[name].sources_of
            and not self._members[name].demerits
            and name not in tried
            and name != node
            and not distribution.comes_from(name, node)
            for name in itertools.chain(distribution.holders, distribution.active)
        )

    def _is_source(self, distribution: _Distribution, member: _Member, node: str | None = None) -> bool:
        """Return whether a node has room for a transfer: to anybody, or to ``node``."""
        if id(distribution) not in member.sources_of or not self._has_room(member):
            return False
        if node is None:
            return True
        return member.name not in distribution.tried.get(node, ()) and not distribution.comes_from(member.name, node)

    def _has_room(self, member: _Member) -> bool:
        return len(member.serving) < self.rules.fan_out

    def _offer(self, distribution: _Distribution, member: _Member) -> None:
        if self._has_room(member):
            offer = (member.demerits, distribution.depths[member.name], next(self._sequence), member.name)
            heapq.heappush(distribution.free, offer)

    # Orders.

    def _send(self, decision: Decision) -> None:
        self._sent[type(decision).__name__] += 1
        self._decisions.append(decision)

    def _order(self, order: Order) -> _Work:
        self._send(order)
        return self._note(order)

    def _note(self, order: Order) -> _Work:
        work = self._works[order.id] = _Work(order, self._now, self._now)
        self._members[order.node].orders[order.id] = work
        return work

    def _close(self, work: _Work) -> None:
        """Take an order off the lists; its source has room for another one."""
        order = work.order
        self._works.pop(order.id, None)
        if (member := self._members.get(order.node)) is not None:
            member.orders.pop(order.id, None)
        if isinstance(order, Fetch) and (source := self._members.get(order.source)) is not None:
            source.serving.pop(order.id, None)
            for distribution in source.sources_of.values():
                self._offer(distribution, source)
                if distribution.pending:
                    self._touched[distribution.key] = None

    def _advanced(self, event: Advanced) -> None:
        orders = self._members[event.node].orders
        for number, nbytes in event.nbytes.items():
            if (work := orders.get(number)) is not None:
                if self._now > work.heard:
                    work.rate = (nbytes - work.nbytes) / (self._now - work.heard)
                work.heard, work.nbytes = self._now, nbytes

    def _check_rates(self, entry: _Entry, distribution: _Distribution) -> None:
        """Give nodes that receive much more slowly than others another source, and nobody such a node as a source.

        A node is not slow by itself if its source is receiving slowly too: it waits for what that waits for. Whether a node or
        its source is slow shows when the node has another source.
        """
        rates = {node: work.rate for node, work in distribution.active.items() if work.rate is not None}
        ended = sorted(distribution.taken.values())
        if not rates or len(rates) + len(ended) < 2:
            return
        usual = sorted(rates.values())[len(rates) * 3 // 4]
        if ended:
            usual = max(usual, distribution.nbytes / max(ended[len(ended) // 2], 1e-6))
        limit = usual / self.rules.slow
        slow = {node for node, rate in rates.items() if rate < limit}
        for node in rates:
            member, source = self._members[node], distribution.source_of(node)
            if source is None:
                continue  # it was receiving from one of those before
            if node not in slow:
                if node in distribution.moved and id(distribution) not in member.sources_of and self.rules.relay:
                    member.sources_of[id(distribution)] = distribution  # its first source was slow, and not it
                    self._offer(distribution, member)
            elif source not in slow:
                self._no_source_any_more(distribution, node)
                self._touch(entry)
                if node not in distribution.moved:
                    distribution.moved[node] = source
                    distribution.tried.setdefault(node, set()).add(source)
                    self._members[source].demerits += 1
                    self._put_back(distribution, node)
                elif not member.demerits:
                    member.demerits = 1
                    if (first := self._members.get(distribution.moved[node])) is not None and first.demerits:
                        first.demerits -= 1
                        self._offer(distribution, first)

    def _put_back(self, distribution: _Distribution, node: str) -> None:
        """End a transfer, and have the node be the next one that gets a source."""
        work = distribution.active.pop(node)
        self._members[node].sources_of.pop(id(distribution), None)  # until it receives again
        self._close(work)
        distribution.arrived[node] = work.nbytes
        distribution.pending[node] = None
        distribution.pending.move_to_end(node, last=False)
        self._touched[distribution.key] = None

    def _check_time(self, work: _Work) -> None:
        """Give up what takes too long."""
        order = work.order
        quiet, taken = self._now - work.heard, self._now - work.since
        if isinstance(order, (ChangeOver, Invalidate)):
            if taken > self.rules.promote_timeout:
                self._lost_order(work, f"{order.node} did not answer in {self.rules.promote_timeout:g} s")
        elif quiet > self.rules.silence:
            self._lost_order(work, f"{order.node} said nothing for {self.rules.silence:g} s")

    def _check_refresh(self, entry: _Entry, refresh: _Refresh) -> None:
        """Go on without nodes that take too long to receive a candidate: they promote when they have it."""
        distribution = refresh.distribution
        if distribution is None or refresh.committed:
            return
        allowed = self.rules.prepare_timeout
        if len(distribution.holders) >= len(refresh.missing):
            taken = sorted(distribution.taken.values())
            most = taken[len(taken) // 2] if taken else 0.0
            allowed = min(allowed, max(self.rules.patience * most, self.rules.patience_least))
        for node in [node for node in refresh.missing if node in distribution.started]:
            if (taking := self._now - distribution.started[node]) > allowed:
                reason = f"it has not received the candidate in {taking:.0f} s"
                self._leave_out_of_refresh(entry, refresh, node, reason)

    # What is known.

    def status(self) -> dict[str, Any]:
        """Return everything as plain data: nodes, keys, and what was counted."""
        return {
            "recovering": sorted(self._expected),
            "nodes": {name: self._node_status(member) for name, member in sorted(self._members.items())},
            "left": dict(self._gone),
            "keys": [self._key_status(entry) for _, entry in sorted(self._entries.items(), key=lambda item: item[0])],
            "bytes_moved": self._moved,
            "bytes_by_mover": dict(self._movers),
            "messages": {"events": dict(self._events), "decisions": dict(self._sent)},
        }

    def _node_status(self, member: _Member) -> dict[str, Any]:
        return {
            "host": member.facts.host,
            "broker": member.facts.broker,
            "device": member.facts.device,
            "python": member.facts.python,
            "torch": member.facts.torch,
            "shared_rpc": member.facts.shared_rpc,
            "heard": self._now - member.heard_at,
            "sent": member.sent,
            "received": member.received,
            "received_by_mover": dict(member.movers),
            "serving": len(member.serving),
            "demerits": member.demerits,
            "doing": [self._doing(work) for work in member.orders.values()],
        }

    def _doing(self, work: _Work) -> dict[str, Any]:
        order = work.order
        what = {"what": type(order).__name__.lower(), "endpoint": order.key.endpoint, "seconds": self._now - work.since}
        if isinstance(order, Fetch):
            what |= {"source": order.source, "nbytes": work.nbytes, "of": order.nbytes}
        return what

    def _key_status(self, entry: _Entry) -> dict[str, Any]:
        current, group = entry.current, entry.key.group
        fields = group.__struct_fields__
        calls = (entry.key.endpoint, entry.key.cache_key)
        others = [key.group for key in self._entries if (key.endpoint, key.cache_key) == calls]
        return {
            "endpoint": entry.key.endpoint,
            "cache_key": entry.key.cache_key,
            "group": {name: getattr(group, name) for name in fields},
            "version": current.version.number if current is not None else None,
            "nbytes": current.nbytes if current is not None else None,
            "nodes": {node: version.number for node, version in sorted(entry.listed.items())},
            "receiving": sorted(current.active) if current is not None else [],
            "waiting": list(entry.waiting),
            "building": entry.build.order.node if entry.build is not None else None,
            "refreshing": entry.refresh is not None,
            "left_out": {node: left_out.reason for node, left_out in sorted(entry.left_out.items())},
            "differs": [name for name in fields if any(getattr(other, name) != getattr(group, name) for other in others)],
        }
