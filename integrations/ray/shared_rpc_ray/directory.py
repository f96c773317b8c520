"""Directory of a cluster: an actor that tracks the holders of each key, assigns builds, and switches versions.

All methods run in one event loop. A pending call of an agent's method is the lease on its work: Ray repeats it after a
restart of the agent, and it fails when the agent is permanently lost. Rules:

- One node at a time builds a key, the first that requests it; the others wait for the same task. A builder that is lost, or
  fails for its own reasons, is replaced by the next waiting node, :data:`BUILDERS` times in total. An exception of the endpoint
  is raised in all waiting nodes, and the next call tries again.
- A node without an object that others hold receives it. It does not build it, because a second build may have other bits.
- A refresh has two phases. One node builds a candidate and the holders receive it; then all nodes that have it promote it. A
  node that fails is left out and reported. Refreshes of a key are queued.
- The highest version is current, unless it was invalidated; nodes that hold another one receive it, or drop theirs, when they
  report. The directory stores nothing: nodes state their objects, and after a restart it makes no decisions until all agents
  have answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared_rpc.errors import ClusterError, ConnectError, EndpointNotFound, RemoteError, SharedRPCError
from shared_rpc.protocol.infos import ClusterStatus
from shared_rpc_ray.membership import Tasks, actor_name, find, got, named
from shared_rpc_ray.messages import FACTS, Call, Change, Key, Lost, SourceFailed, Statement, Transfer, Version
from shared_rpc_ray.transfer import part_nbytes

#: Maximum number of nodes that try to build a key.
BUILDERS = 3
#: Maximum number of attempts to transfer a version to a node.
_TRANSFERS = 5
#: Seconds that a new directory waits for the statements of all agents.
_RECOVERY = 10.0
#: Timeouts in seconds for a node to receive a candidate, and to promote or invalidate.
_PREPARE, _PROMOTE = 600.0, 30.0


@dataclass(eq=False)
class _Member:
    """A node that has joined."""

    agent: Any
    statement: Statement
    #: Its latest report.
    status: ClusterStatus = field(default_factory=lambda: ClusterStatus(bytes_received=0, bytes_sent=0, activity=[]))


@dataclass(eq=False)
class _Entry:
    """A key with its current version, the version of each holder, and the work in progress."""

    key: Key
    version: Version | None = None
    holders: dict[str, Version] = field(default_factory=dict)
    #: The task of the running build, and its node.
    build: asyncio.Task[None] | None = None
    builder: str = ""
    #: Nodes with waiting callers.
    waiting: set[str] = field(default_factory=set)
    #: Nodes without the current version, with the reasons; and nodes that are receiving it, or dropping theirs.
    left_out: dict[str, str] = field(default_factory=dict)
    mending: set[str] = field(default_factory=set)
    #: Serialises refreshes and invalidations; and the queued refreshes, by their arguments.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    queued: dict[bytes, asyncio.Task[Change]] = field(default_factory=dict)
    next_number: int = 1
    #: Invalidated versions: those below this number, and these, which may have no number.
    valid_from: int = 0
    invalid: set[Version] = field(default_factory=set)

    def number(self) -> int:
        """Return the number of the next build."""
        self.next_number += 1
        return self.next_number - 1

    def settle(self) -> None:
        """Make the highest held version the current one; its holders are no longer left out."""
        dropped = range(1, self.valid_from)
        valid = {held for held in self.holders.values() if held.number not in dropped} - self.invalid
        self.version = max(valid, default=None)
        for node in self.current_holders():
            self.left_out.pop(node, None)

    def lose(self, node: str) -> None:
        """Remove a node from the holders."""
        self.left_out.pop(node, None)
        if self.holders.pop(node, None) is not None:
            self.settle()

    def invalidate(self) -> None:
        """Invalidate all versions built until now."""
        self.valid_from, self.invalid = self.next_number, set(self.holders.values())
        self.settle()

    def current_holders(self) -> list[str]:
        """Return the nodes that hold the current version."""
        return [node for node, version in self.holders.items() if version == self.version]

    def change(self, version: Version | None, outcomes: dict[str, Any], error: Exception | None = None) -> Change:
        """Return the outcome of a change. Failed nodes that hold another version are left out until they have this one."""
        key, left_out = self.key, {name: str(found) for name, found in outcomes.items() if isinstance(found, Exception)}
        if error is None:
            self.left_out.update({name: left_out[name] for name in left_out.keys() & self.holders.keys()})
        nodes = tuple(sorted(outcomes.keys() - left_out.keys())) if error is None else ()
        kind = {name: getattr(key.group, name) for name in FACTS}
        number = version.number if version is not None else None
        return Change(key.endpoint, key.cache_key, kind, number, nodes, left_out, error)


class Directory:
    """The actor, one per cluster. Ray restarts it, if necessary on another node."""

    async def __init__(self, cluster: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._cluster = cluster
        self._members: dict[str, _Member] = {}
        self._entries: dict[Key, _Entry] = {}
        self._tasks = Tasks()
        self._recovered = asyncio.Event()
        self._tasks.spawn(self._recover())

    async def _recover(self) -> None:
        """Collect the statements of all agents of the cluster. An agent that is too slow joins again by itself."""

        async def ask(name: str) -> tuple[Statement, Any]:
            agent = find(actor_name(self._cluster, "agent", name))
            return await got(agent.state.remote()), agent

        try:
            answers = await self._each(await asyncio.to_thread(named, self._cluster, "agent"), ask, _RECOVERY)
            for answer in answers.values():
                if not isinstance(answer, Exception):
                    self._take(*answer)
        finally:
            self._recovered.set()

    # Methods for agents.

    async def join(self, statement: Statement, agent: Any) -> None:
        """Add a node, or add it again."""
        await self._recovered.wait()
        self._take(statement, agent)

    async def report(self, node: str, dropped: dict[Key, Version], status: ClusterStatus) -> int:
        """Record objects that a broker has dropped itself, and its agent's status; return the number of nodes.

        Each report triggers an attempt to replace outdated versions of the node by the current ones, or to drop them.

        :raises Lost: if the node is not a member.
        """
        await self._recovered.wait()
        self._member(node).status = status
        for key, version in dropped.items():
            entry = self._entries.get(key)
            if entry is not None and entry.holders.get(node) == version:
                entry.lose(node)
        for entry in self._entries.values():
            differs = node in entry.holders and entry.holders[node] != entry.version
            if differs and node not in entry.mending and not entry.lock.locked():
                entry.mending.add(node)
                self._tasks.spawn(self._mend(entry, node))
        return len(self._members)

    async def want(self, node: str, key: Key) -> None:
        """Provide a missing object to a node: from a holder, or by a build on this or another node.

        :raises Lost: if the node is not a member.
        :raises RemoteError: if the endpoint raised.
        :raises SharedRPCError: if no node could build it, or it could not be transferred to the node.
        """
        await self._recovered.wait()
        entry = self._entry(key)
        entry.lose(node)
        entry.waiting.add(node)
        failures: dict[str, Exception] = {}
        try:
            while entry.version is None or entry.holders.get(node) != entry.version:
                self._member(node)
                if entry.version is not None:
                    try:
                        await self._bring(entry, node)
                    except ClusterError as error:
                        if entry.version is not None:
                            entry.left_out[node] = str(error)
                            raise
                    continue
                if len(failures) >= BUILDERS:
                    raise _failed(f"{len(failures)} nodes could not build {key.cache_key}", failures)
                if entry.build is None:
                    entry.build, entry.builder = self._tasks.spawn(self._build(entry, node)), node
                builder, build = entry.builder, entry.build
                try:
                    await asyncio.shield(build)
                except SharedRPCError as error:
                    if isinstance(error, RemoteError) or (builder == node and not isinstance(error, Lost)):
                        raise
                    failures[builder] = error
        finally:
            entry.waiting.discard(node)

    # Methods for users.

    async def refresh(self, host: str, endpoint: str, call: Call) -> list[Change]:
        """Refresh a call for each group of nodes that holds it, a group of ``host`` first; if none does, a node builds it."""
        node, key = await self._key_of(host, endpoint, call)
        payload = msgspec.msgpack.encode(call)
        entries = self._kept(endpoint, key.cache_key) or [self._entry(key)]
        entries.sort(key=lambda entry: entry.key != key)
        for entry in entries:
            if payload not in entry.queued:
                entry.queued[payload] = self._tasks.spawn(self._refresh(entry, node, payload))
        return await asyncio.gather(*(asyncio.shield(entry.queued[payload]) for entry in entries))

    async def invalidate(self, host: str, endpoint: str, call: Call | None) -> list[Change]:
        """Invalidate a call, or all calls of an endpoint, on every node."""
        _, key = await self._key_of(host, endpoint, call)
        return await asyncio.gather(*map(self._invalidate, self._kept(endpoint, key.cache_key if call is not None else None)))

    async def status(self) -> dict[str, Any]:
        """Return nodes and keys of the cluster, as plain data."""
        await self._recovered.wait()
        return {
            "cluster": self._cluster,
            "nodes": {
                node: {"broker": member.statement.broker, **member.statement.place.facts, **member.status}
                for node, member in self._members.items()
            },
            "bytes_moved": sum(member.status["bytes_received"] for member in self._members.values()),
            "keys": [self._shown(entry) for entry in self._entries.values()],
        }

    async def _key_of(self, host: str, endpoint: str, call: Call | None) -> tuple[str, Key]:
        """Return a node whose broker has an endpoint, if possible on ``host``, and the key of the call.

        :raises EndpointNotFound: if no broker has it.
        """
        await self._recovered.wait()
        for node in sorted(self._members, key=lambda node: self._members[node].statement.place.host != host):
            with contextlib.suppress(Lost, ConnectError, EndpointNotFound):  # lost in the meantime, or with another app
                return node, await self._ask(node, "key_of", endpoint, call)
        raise EndpointNotFound(
            f"no node of cluster {self._cluster!r} has an endpoint {endpoint!r}: {', '.join(sorted(self._members))}"
        )

    # Members.

    def _take(self, statement: Statement, agent: Any) -> None:
        """Replace the state of a node by its statement."""
        node = statement.place.node
        member = self._members[node] = _Member(agent, statement)
        self._tasks.spawn(self._watch(node, member))
        for entry in self._entries.values():
            entry.lose(node)
        for key, held in statement.held.items():
            self._hold(self._entry(key), node, held.version)
        for key in statement.builds:
            entry = self._entry(key)
            if entry.build is None and not entry.holders:
                entry.build, entry.builder = self._tasks.spawn(self._build(entry, node)), node

    async def _watch(self, node: str, member: _Member) -> None:
        """Wait until an agent is permanently lost, and remove the node."""
        with contextlib.suppress(Lost):
            await got(member.agent.hold.remote())
        if self._members.get(node) is member:
            del self._members[node]
            for entry in self._entries.values():
                entry.lose(node)

    def _member(self, node: str) -> _Member:
        """Return the member of a node.

        :raises Lost: if it has left.
        """
        if node not in self._members:
            raise Lost(f"{node} is not a member of the cluster: it has left, or must join first")
        return self._members[node]

    async def _ask(self, node: str, method: str, *arguments: Any) -> Any:
        """Call an agent's method.

        :raises Lost: if the node has left, or is lost.
        """
        return await got(getattr(self._member(node).agent, method).remote(*arguments))

    # Keys.

    def _entry(self, key: Key) -> _Entry:
        return self._entries.setdefault(key, _Entry(key))

    def _kept(self, endpoint: str, cache_key: str | None) -> list[_Entry]:
        """Return the entries of a call, or of an endpoint, that have holders."""
        return [
            entry
            for key, entry in self._entries.items()
            if key.endpoint == endpoint and cache_key in (None, key.cache_key) and entry.holders
        ]

    def _hold(self, entry: _Entry, node: str, version: Version) -> None:
        """Record that a node holds a version."""
        if node not in self._members:
            return
        entry.holders[node] = version
        entry.next_number = max(entry.next_number, version.number + 1)
        entry.settle()

    async def _mend(self, entry: _Entry, node: str) -> None:
        """Transfer the current version to a node that holds another one, or have it drop that one."""
        try:
            await (self._drop(entry, node) if entry.version is None else self._bring(entry, node))
        except SharedRPCError as error:
            entry.left_out[node] = str(error)
        finally:
            entry.mending.discard(node)

    async def _drop(self, entry: _Entry, node: str) -> None:
        """Have a node drop an invalidated version."""
        held = entry.holders.get(node)
        await self._ask(node, "invalidate", entry.key)
        if entry.holders.get(node) == held:
            entry.lose(node)

    async def _build(self, entry: _Entry, node: str) -> None:
        number = entry.number()
        try:
            self._hold(entry, node, await self._ask(node, "build", entry.key, number))
        finally:
            entry.build, entry.builder = None, ""

    async def _bring(self, entry: _Entry, node: str) -> None:
        """Transfer the current version to a node.

        :raises ClusterError: if the node cannot store it, or no source can send it.
        """
        version = entry.version
        assert version is not None, "a version is held"
        await self._transfer("receive", entry, node, version, entry.current_holders)
        self._hold(entry, node, version)

    async def _transfer(
        self, order: str, entry: _Entry, node: str, version: Version, sources: Callable[[], Iterable[str]]
    ) -> None:
        """Have a node receive a version from one of the sources, and from another one if that fails."""
        failed: list[str] = []
        problem = "all nodes that hold it have left"
        place = self._member(node).statement.place
        for _ in range(_TRANSFERS):
            places = {name: self._members[name].statement.place for name in sources() if name in self._members and name != node}
            if not places:
                break
            # All receivers of a host prefer the same source, because its parts are in the store already.
            source = min(places, key=lambda name: (failed.count(name), places[name].host != place.host, name))
            parts = part_nbytes(min(place.store_nbytes, places[source].store_nbytes))
            mover = place.mover if place.mover == places[source].mover and not failed else "objects"
            transfer = Transfer(source, parts, mover, bool(failed))
            try:
                await self._ask(node, order, entry.key, version, transfer, self._members[source].agent)
                return
            except SourceFailed as error:
                failed.append(source)
                problem = f"{source}: {error}"
            except SharedRPCError as error:  # converted, because Lost would stand for the caller's own node
                raise ClusterError(str(error)) from error
        raise ClusterError(f"{entry.key.cache_key} could not be received: {problem}")

    # Changes.

    async def _refresh(self, entry: _Entry, node: str, payload: bytes) -> Change:
        async with entry.lock:
            entry.queued.pop(payload, None)
            outcomes: dict[str, Any] = {}
            for builder in sorted(entry.holders or [node], key=lambda name: name != node)[:BUILDERS]:
                try:
                    version: Version = await self._ask(builder, "prepare", entry.key, entry.number(), payload)
                    break
                except SharedRPCError as error:
                    outcomes[builder] = error
                    if isinstance(error, RemoteError):
                        return entry.change(None, outcomes, error)
            else:
                return entry.change(None, outcomes, _failed("no node could build it", outcomes))
            ready = [builder]

            async def prepare(name: str) -> None:
                await self._transfer("receive_candidate", entry, name, version, lambda: ready)
                ready.append(name)

            outcomes |= await self._each([name for name in entry.holders if name != builder], prepare, _PREPARE)
            outcomes |= await self._each(list(ready), lambda name: self._ask(name, "promote", entry.key, version), _PROMOTE)
            promoted = {name for name, found in outcomes.items() if not isinstance(found, Exception)}
            for name in (outcomes.keys() - promoted) & self._members.keys():
                self._tasks.spawn(self._ask(name, "discard", entry.key))
            if not promoted:
                return entry.change(None, outcomes, _failed("no node could promote it", outcomes))
            change = entry.change(version, outcomes)
            for name in promoted:
                self._hold(entry, name, version)
            return change

    async def _invalidate(self, entry: _Entry) -> Change:
        async with entry.lock:
            entry.invalidate()
            return entry.change(None, await self._each(list(entry.holders), lambda name: self._drop(entry, name), _PROMOTE))

    async def _each(self, names: list[str], work: Callable[[str], Awaitable[Any]], seconds: float) -> dict[str, Any]:
        """Run ``work`` concurrently for all names; return the results and exceptions by name."""

        async def limited(name: str) -> Any:
            try:
                return await asyncio.wait_for(work(name), seconds)
            except TimeoutError:
                raise Lost(f"{name} did not answer in {seconds:g} s") from None

        return dict(zip(names, await asyncio.gather(*map(limited, names), return_exceptions=True), strict=True))

    def _shown(self, entry: _Entry) -> dict[str, Any]:
        key, version = entry.key, entry.version
        groups = [other.group for other in self._entries if (other.endpoint, other.cache_key) == (key.endpoint, key.cache_key)]
        facts = msgspec.structs.asdict(key.group)
        return {
            "endpoint": key.endpoint,
            "cache_key": key.cache_key,
            "group": facts,
            "differs": [name for name in facts if len({getattr(group, name) for group in groups}) > 1],
            "version": version.number if version is not None else None,
            "nbytes": version.nbytes if version is not None else None,
            "nodes": {node: held.number for node, held in sorted(entry.holders.items())},
            "building": entry.builder or None,
            "waiting": sorted(entry.waiting),
            "refreshing": entry.lock.locked(),
            "left_out": dict(entry.left_out),
        }


def _failed(problem: str, failures: dict[str, Exception]) -> ClusterError:
    return ClusterError(f"{problem}: {'; '.join(f'{name}: {why}' for name, why in failures.items())}")
