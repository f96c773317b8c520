"""Directory of a cluster: an actor that knows who holds what, has one node build a key, and changes versions over.

All methods run in one event loop. A pending call of an agent's method is the lease on what it does: Ray repeats it when it
restarts the agent, and it fails when the agent is gone for good. Rules:

- One node at a time builds a key, the first that asks; the others wait for the same task. A builder that is lost, or fails for
  reasons of its own, is replaced by the next node that waits, :data:`BUILDERS` times in all. An exception of the endpoint goes
  to all that wait, and the next call tries again.
- A node that misses what others hold receives it. It does not build for itself: a second build need not have the same bits.
- A refresh has two phases. One node builds a candidate and the holders receive it; then all that have it promote it. A node
  that fails is left out and named, and receives the current version as soon as it can. Refreshes of a key queue up.
- The highest version is current, unless it was invalidated; nodes that hold another one receive it, or drop theirs. What nodes
  hold is what they state: the directory stores nothing, and asks all agents after a restart. Until they have answered, it
  decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shared_rpc.errors import ClusterError, RemoteError, SharedRPCError
from shared_rpc_ray.membership import Tasks, actor_name, find, got, named
from shared_rpc_ray.messages import FACTS, Change, Key, Lost, Receive, SourceFailed, Statement, Version

_log = logging.getLogger("shared_rpc_ray")

#: Nodes that may fail to build a key, one after the other.
BUILDERS = 3
#: Attempts to bring a version to a node.
_TRANSFERS = 5
#: Seconds for which a new directory waits for the agents to state what they hold.
_RECOVERY = 10.0
#: Seconds that a node may take to receive a candidate, and to promote or invalidate.
_PREPARE, _PROMOTE = 600.0, 30.0
#: Seconds before a node that was left out is tried again: the first time, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0
#: Nodes that have left, of which the reason is known.
_GONE = 20


@dataclass(eq=False)
class _Member:
    """A node that has joined."""

    agent: Any
    statement: Statement


@dataclass(eq=False)
class _Entry:
    """A key: the current version, who holds which one, and what is being done about it."""

    key: Key
    version: Version | None = None
    nbytes: int = 0
    holders: dict[str, Version] = field(default_factory=dict)
    #: The task of the build that is running, and its node.
    build: asyncio.Task[None] | None = None
    builder: str = ""
    #: Nodes whose callers wait.
    waiting: set[str] = field(default_factory=set)
    #: Nodes without the current version, and why; and those that are about to get it.
    left_out: dict[str, str] = field(default_factory=dict)
    mending: set[str] = field(default_factory=set)
    #: One refresh or invalidation at a time. Refreshes that wait for it, by their arguments.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    queued: dict[bytes, asyncio.Task[Change]] = field(default_factory=dict)
    next_number: int = 1
    #: Versions below this number were invalidated, and these, which may have no number.
    valid_from: int = 0
    invalid: set[Version] = field(default_factory=set)

    def number(self) -> int:
        """Return the number of the next build."""
        self.next_number += 1
        return self.next_number - 1

    def settle(self) -> None:
        """Make the highest version that a node holds the current one."""
        dropped = range(1, self.valid_from)
        valid = {held for held in self.holders.values() if held.number not in dropped} - self.invalid
        self.version = max(valid, default=None)

    def lose(self, node: str) -> None:
        """Forget what a node holds."""
        self.left_out.pop(node, None)
        if self.holders.pop(node, None) is not None:
            self.settle()

    def invalidate(self) -> None:
        """Let no version be current that was built until now."""
        self.valid_from, self.invalid = self.next_number, set(self.holders.values())
        self.settle()

    def current_holders(self) -> list[str]:
        """Return the nodes that hold the current version."""
        return [node for node, version in self.holders.items() if version == self.version]

    def change(
        self, version: Version | None, nodes: Iterable[str], failures: dict[str, Exception], error: Exception | None = None
    ) -> Change:
        """Return the outcome of a change. Nodes that failed, and hold another version, are left out until they get this one."""
        key, left_out = self.key, {name: str(failure) for name, failure in failures.items()}
        if error is None:
            self.left_out.update({name: left_out[name] for name in left_out.keys() & self.holders.keys()})
        kind = {name: getattr(key.group, name) for name in FACTS}
        number = version.number if version is not None else None
        return Change(key.endpoint, key.cache_key, kind, number, tuple(sorted(nodes)), left_out, error)


class Directory:
    """The actor. There is one for a cluster; Ray restarts it, on another node if it has to."""

    async def __init__(self, cluster: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._cluster = cluster
        self._members: dict[str, _Member] = {}
        self._entries: dict[Key, _Entry] = {}
        self._gone: dict[str, str] = {}
        self._tasks = Tasks()
        self._recovered = asyncio.Event()
        self._tasks.spawn(self._recover())

    async def _recover(self) -> None:
        """Ask the agents of the cluster what they hold and build. One that is slow is taken in when it answers."""

        async def ask(name: str) -> None:
            agent = find(actor_name(self._cluster, "agent", name))
            statement = await got(agent.state.remote())
            if name not in self._members:
                self._take(statement, agent)

        try:
            asked = [self._tasks.spawn(ask(name)) for name in await asyncio.to_thread(named, self._cluster, "agent")]
            if asked and (await asyncio.wait(asked, timeout=_RECOVERY))[1]:
                _log.warning("some agents did not state what they hold in %g s", _RECOVERY)
        finally:
            self._recovered.set()

    # Methods for agents.

    async def join(self, statement: Statement, agent: Any) -> list[str]:
        """Take a node in, or back; return a line for each kind of nodes that cannot share records with it."""
        await self._recovered.wait()
        self._take(statement, agent)
        here, lines = statement.facts, {}
        for node, member in self._members.items():
            there = member.statement.facts
            what = ", ".join(f"{name} {there[name]} there and {here[name]} here" for name in FACTS if there[name] != here[name])
            if what:
                lines[what] = f"{node} has {what}: each of both kinds of nodes builds for itself"
        return list(lines.values())

    async def report(self, node: str, dropped: dict[Key, Version]) -> int:
        """Note what a broker has evicted or invalidated by itself; return the number of nodes.

        :raises Lost: if the node is no member (any more).
        """
        await self._recovered.wait()
        if node not in self._members:
            raise Lost(f"{node} is no member: it has to join first")
        for key, version in dropped.items():
            entry = self._entries.get(key)
            if entry is not None and entry.holders.get(node) == version:
                entry.lose(node)
        return len(self._members)

    async def want(self, node: str, key: Key) -> None:
        """Have a node get an object that it misses: from a node that holds it, or by a build, here or there.

        :raises Lost: if the node is no member (any more).
        :raises RemoteError: if the endpoint raised.
        :raises SharedRPCError: if no node could build it, or it could not be brought to the node.
        """
        await self._recovered.wait()
        entry = self._entry(key)
        entry.lose(node)
        entry.waiting.add(node)
        failures: dict[str, str] = {}
        try:
            while entry.version is None or entry.holders.get(node) != entry.version:
                if node not in self._members:
                    raise Lost(f"{node} is no member: it has to join first")
                if entry.current_holders():
                    try:
                        await self._bring(entry, node)
                    except ClusterError as error:
                        if entry.current_holders():
                            entry.left_out[node] = str(error)
                            raise
                    continue
                if len(failures) >= BUILDERS:
                    why = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
                    raise ClusterError(f"{len(failures)} nodes could not build {key.cache_key}: {why}")
                if entry.build is None:
                    entry.build, entry.builder = self._tasks.spawn(self._build(entry, node)), node
                builder, build = entry.builder, entry.build
                try:
                    await asyncio.shield(build)
                except (Lost, SharedRPCError) as error:
                    if isinstance(error, RemoteError) or (builder == node and not isinstance(error, Lost)):
                        raise
                    failures[builder] = str(error)
        finally:
            entry.waiting.discard(node)

    # Methods for users.

    async def refresh(self, node: str, key: Key, payload: bytes) -> list[Change]:
        """Refresh a call for each group of nodes that holds it, that of the key first; where none does, a node builds it."""
        await self._recovered.wait()
        entries = self._held(key.endpoint, key.cache_key) or [self._entry(key)]
        entries.sort(key=lambda entry: entry.key != key)
        return await asyncio.gather(*(self._queue_refresh(entry, node, payload) for entry in entries))

    async def invalidate(self, endpoint: str, cache_key: str | None) -> list[Change]:
        """Invalidate a call, or all calls of an endpoint, on every node."""
        await self._recovered.wait()
        return await asyncio.gather(*map(self._invalidate, self._held(endpoint, cache_key)))

    async def status(self) -> dict[str, Any]:
        """Return what the cluster has and does, as plain data."""
        await self._recovered.wait()
        members = dict(self._members)
        doing = await self._each(members, lambda node: got(members[node].agent.doing.remote()), 2.0)
        nodes = {}
        for node, member in members.items():
            found = doing[node] if isinstance(doing[node], dict) else {"received": None, "sent": None, "doing": []}
            nodes[node] = {"broker": member.statement.broker, **member.statement.facts, **found}
        return {
            "cluster": self._cluster,
            "nodes": nodes,
            "left": dict(self._gone),
            "bytes_moved": sum(found["received"] or 0 for found in nodes.values()),
            "keys": [self._shown(entry) for entry in self._entries.values()],
        }

    # Members.

    def _take(self, statement: Statement, agent: Any) -> None:
        """Replace all that is known of a node by its statement."""
        node = statement.node
        member = self._members[node] = _Member(agent, statement)
        self._gone.pop(node, None)
        self._tasks.spawn(self._watch(node, member))
        for entry in self._entries.values():
            entry.lose(node)
        for key, held in statement.held.items():
            self._hold(self._entry(key), node, held.version, held.nbytes)
        for key in statement.builds:
            entry = self._entry(key)
            if entry.build is None and not entry.holders:
                entry.build, entry.builder = self._tasks.spawn(self._build(entry, node)), node

    async def _watch(self, node: str, member: _Member) -> None:
        """Wait until an agent is gone for good."""
        try:
            reason = await got(member.agent.hold.remote())
        except Lost as error:
            reason = str(error)
        if self._members.get(node) is member:
            self._left(node, reason)

    def _left(self, node: str, reason: str) -> None:
        if self._members.pop(node, None) is None:
            return
        self._gone[node] = reason
        while len(self._gone) > _GONE:
            del self._gone[next(iter(self._gone))]
        for entry in self._entries.values():
            entry.lose(node)

    async def _ask(self, node: str, method: str, *arguments: Any) -> Any:
        """Call an agent's method.

        :raises Lost: if the node has left, or is lost.
        """
        member = self._members.get(node)
        try:
            if member is None:
                raise Lost(self._gone.get(node, "it has left"))
            return await got(getattr(member.agent, method).remote(*arguments))
        except Lost as error:
            raise Lost(f"{node} was lost: {error}") from error

    # Keys.

    def _entry(self, key: Key) -> _Entry:
        return self._entries.setdefault(key, _Entry(key))

    def _held(self, endpoint: str, cache_key: str | None) -> list[_Entry]:
        return [
            entry
            for key, entry in self._entries.items()
            if key.endpoint == endpoint and cache_key in (None, key.cache_key) and entry.holders
        ]

    def _hold(self, entry: _Entry, node: str, version: Version, nbytes: int) -> None:
        """Note that a node holds a version."""
        if node not in self._members:
            return
        entry.holders[node] = version
        entry.next_number = max(entry.next_number, version.number + 1)
        entry.settle()
        if entry.version == version:
            entry.nbytes = nbytes
        self._mend(entry)

    def _mend(self, entry: _Entry) -> None:
        for node, version in entry.holders.items():
            if version == entry.version:
                entry.left_out.pop(node, None)
            elif node not in entry.mending:
                entry.mending.add(node)
                self._tasks.spawn(self._mend_node(entry, node))

    async def _mend_node(self, entry: _Entry, node: str) -> None:
        """Bring the current version to a node that holds another one, or have it drop that, however often it fails."""
        pause = _FIRST_PAUSE
        try:
            while True:
                await asyncio.sleep(pause)
                if entry.holders.get(node) in (None, entry.version):
                    return
                try:
                    await (self._drop(entry, node) if entry.version is None else self._bring(entry, node))
                except (Lost, SharedRPCError) as error:
                    entry.left_out[node] = str(error)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            entry.mending.discard(node)

    async def _drop(self, entry: _Entry, node: str) -> None:
        """Have a node drop a version that was invalidated."""
        held = entry.holders[node]
        await self._ask(node, "invalidate", entry.key)
        if entry.holders.get(node) == held:
            entry.lose(node)

    async def _build(self, entry: _Entry, node: str) -> None:
        number = entry.number()
        try:
            origin, nbytes = await self._ask(node, "build", entry.key, number)
            self._hold(entry, node, Version(number, origin), nbytes)
        finally:
            entry.build, entry.builder = None, ""

    async def _bring(self, entry: _Entry, node: str) -> None:
        """Bring the current version to a node.

        :raises ClusterError: if the node cannot take it, or gets it from no other.
        """
        version = entry.version
        assert version is not None, "somebody holds it"
        await self._receive(entry, node, version, entry.nbytes, entry.current_holders)
        self._hold(entry, node, version, entry.nbytes)

    async def _receive(
        self,
        entry: _Entry,
        node: str,
        version: Version,
        nbytes: int,
        sources: Callable[[], Iterable[str]],
        *,
        candidate: bool = False,
    ) -> None:
        failed: Counter[str] = Counter()
        problem = "no node that holds it is left"
        try:
            for _ in range(_TRANSFERS):
                found = [source for source in sources() if source in self._members and source != node]
                if not found or node not in self._members:
                    break
                host = self._members[node].statement.host
                # All receivers of a host prefer one source: the parts that it has put are in the store then.
                source = min(found, key=lambda name: (failed[name], self._members[name].statement.host != host, name))
                order = Receive(entry.key, version, nbytes, source, self._members[source].agent, candidate, bool(failed))
                try:
                    await self._ask(node, "receive", order)
                    return
                except SourceFailed as error:
                    failed[source] += 1
                    problem = f"{source}: {error}"
        except (Lost, SharedRPCError) as error:
            raise ClusterError(str(error)) from error
        raise ClusterError(f"{entry.key.cache_key} could not be received: {problem}")

    # Changes.

    def _queue_refresh(self, entry: _Entry, node: str, payload: bytes) -> Awaitable[Change]:
        if payload not in entry.queued:
            entry.queued[payload] = self._tasks.spawn(self._refresh(entry, node, payload))
        return asyncio.shield(entry.queued[payload])

    async def _refresh(self, entry: _Entry, node: str, payload: bytes) -> Change:
        async with entry.lock:
            entry.queued.pop(payload, None)
            holders = list(entry.holders) or [node]
            failures: dict[str, Exception] = {}
            for builder in sorted(holders, key=lambda name: name != node)[:BUILDERS]:
                number = entry.number()
                try:
                    origin, nbytes = await self._ask(builder, "prepare", entry.key, number, payload)
                    break
                except (Lost, SharedRPCError) as error:
                    failures[builder] = error
                    if isinstance(error, RemoteError):
                        return entry.change(None, (), failures, error)
            else:
                return entry.change(None, (), failures, _failed("no node could build it", failures))
            version = Version(number, origin)
            ready = [builder]

            async def prepare(name: str) -> None:
                await self._receive(entry, name, version, nbytes, lambda: ready, candidate=True)
                ready.append(name)

            others = [name for name in entry.holders if name != builder]
            outcomes = await self._each(others, prepare, _PREPARE)
            outcomes |= await self._each(list(ready), lambda name: self._ask(name, "promote", entry.key, version), _PROMOTE)
            failures = {name: found for name, found in (failures | outcomes).items() if isinstance(found, Exception)}
            for name in failures.keys() & self._members.keys():
                self._tasks.spawn(self._ask(name, "discard", entry.key, version))
            promoted = outcomes.keys() - failures.keys()
            if not promoted:
                return entry.change(None, (), failures, _failed("no node could promote it", failures))
            change = entry.change(version, promoted, failures)
            for name in promoted:
                self._hold(entry, name, version, nbytes)
            return change

    async def _invalidate(self, entry: _Entry) -> Change:
        async with entry.lock:
            entry.invalidate()
            holders = list(entry.holders)
            outcomes = await self._each(holders, lambda name: self._drop(entry, name), _PROMOTE)
            failures = {name: found for name, found in outcomes.items() if isinstance(found, Exception)}
            change = entry.change(None, set(holders) - failures.keys(), failures)
            self._mend(entry)
            return change

    # Helpers.

    async def _each(self, names: Iterable[str], work: Callable[[str], Awaitable[Any]], seconds: float) -> dict[str, Any]:
        """Do the work for all names at once; return the results and exceptions by name."""

        async def limited(name: str) -> Any:
            try:
                return await asyncio.wait_for(work(name), seconds)
            except TimeoutError:
                raise Lost(f"{name} did not answer in {seconds:g} s") from None

        found = list(names)
        outcomes = await asyncio.gather(*map(limited, found), return_exceptions=True)
        return dict(zip(found, outcomes, strict=True))

    def _shown(self, entry: _Entry) -> dict[str, Any]:
        key, number = entry.key, entry.version.number if entry.version is not None else None
        groups = [other.group for other in self._entries if (other.endpoint, other.cache_key) == (key.endpoint, key.cache_key)]
        facts = {name: getattr(key.group, name) for name in key.group.__struct_fields__}
        return {
            "endpoint": key.endpoint,
            "cache_key": key.cache_key,
            "group": facts,
            "differs": [name for name in facts if len({getattr(group, name) for group in groups}) > 1],
            "version": number,
            "nbytes": entry.nbytes if number is not None else None,
            "nodes": {node: version.number for node, version in sorted(entry.holders.items())},
            "building": entry.builder or None,
            "waiting": sorted(entry.waiting),
            "refreshing": entry.lock.locked(),
            "left_out": dict(entry.left_out),
        }


def _failed(problem: str, failures: dict[str, Exception]) -> ClusterError:
    return ClusterError(f"{problem}: {'; '.join(map(str, failures.values()))}")
