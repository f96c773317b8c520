"""The agent of a node: it answers the misses of its broker as the directory decides, and transfers records between brokers.

It is an actor of Ray, and the broker is no child of it: either can be killed, and the other goes on. It runs no code of users,
unpickles nothing of theirs, and needs no torch for host memory. Every order can be repeated, as after a restart of the agent or
of the directory: what runs already is joined, what is done already is left as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import Any, NamedTuple, cast

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from shared_rpc.client.exported import AsyncExportedRecord
from shared_rpc.client.handle import AsyncHandle
from shared_rpc.client.steps import Operation, Request, ask
from shared_rpc.errors import (
    ClusterError,
    ConfigurationError,
    ConnectError,
    ConnectionClosed,
    EndpointNotFound,
    RemoteError,
    SharedRPCError,
)
from shared_rpc.execution.endpoints import key_of
from shared_rpc.operations.async_client import AsyncClient
from shared_rpc.operations.records import held
from shared_rpc.operations.sources import AsyncSource
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.infos import ClusterStatus, EndpointInfo
from shared_rpc.protocol.sources import Miss
from shared_rpc.protocol.values import decode_call
from shared_rpc.settings import change_environment
from shared_rpc_ray.directory import Directory
from shared_rpc_ray.membership import LOST, actor_name, find, find_or_create, first_line
from shared_rpc_ray.memo import Memo
from shared_rpc_ray.messages import (
    AgentPlace,
    Failed,
    Group,
    Holding,
    Key,
    Lost,
    Receive,
    SourceFailed,
    Statement,
    Version,
    packed,
    unpacked,
)
from shared_rpc_ray.transfer import Sending, digest_of, in_turn, part_nbytes, parts_of, take

__all__ = ["NodeAgent"]

_log = logging.getLogger("shared_rpc_ray")

#: Seconds to wait for the broker: it ran when the agent was created, and its end is to be noticed soon.
_CONNECT = 1.0
#: Seconds between two comparisons of what the broker holds with what it held, as it evicts and invalidates by itself.
_LOOK = 2.0
#: Seconds between two comparisons of the nodes' versions and devices.
_CENSUS = 30.0
#: Parts that a receiver has under way while it writes another one.
_AHEAD = 2
#: Seconds in which a source answers for a part, and Ray brings it.
_ANSWER = 60.0
#: Seconds for which a build that the directory ordered may have neither a miss nor a run.
_BUILD_APPEARS = 5.0
#: Lines for the server's log that the joiner has not read; older ones are dropped.
_LINES = 1000
#: Seconds before a lost directory is looked for again, at most.
_PAUSE = 0.5


class _Held(NamedTuple):
    """A version that is current in the broker."""

    version: Version
    object_id: str
    nbytes: int


class _Offer(NamedTuple):
    """A receiver's share in a record that is being sent."""

    what: Hashable
    sending: Sending
    watch: asyncio.Task[None]


class _Work:
    """An order that is being carried out, and how far it has come."""

    def __init__(self, doing: dict[str, Any]) -> None:
        self.doing = doing
        self.since = time.monotonic()
        self.task: asyncio.Task[Any]


class NodeAgent:
    """The agent of a node. All methods are coroutines of one loop; bytes are copied in threads."""

    async def __init__(self, place: AgentPlace) -> None:  # type: ignore[misc]  # Ray awaits it
        change_environment({"CUDA_VISIBLE_DEVICES": place.gpus, "SHARED_TENSOR_SOURCE_TOKEN": place.token})
        self._place = place
        self._client = AsyncClient(socket_path=place.socket, timeout=None, connect_timeout=_CONNECT)
        info = await self._client.get_server_info()
        devices = {found["id"]: found for found in await self._client.list_devices()}
        device = place.facts.get("device") or ("cpu" if info["device"] == "cpu" else devices[info["device"]]["name"])
        self._facts = {**place.facts, "device": device}
        self._broker = f"{place.socket} (pid {info['pid']})"
        self._mover = place.mover
        self._memo = Memo(place.socket)
        self._held: dict[Key, _Held] = {}
        #: Candidates by key and origin.
        self._candidates: dict[tuple[Key, str], AsyncHandle[Any]] = {}
        #: Misses without an answer.
        self._misses: dict[Key, Miss] = {}
        self._running: dict[Hashable, _Work] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Records that are being sent, and offers to receivers by their numbers.
        self._sendings: dict[Hashable, Sending] = {}
        self._offers: dict[int, _Offer] = {}
        self._offering = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._received = self._sent = self._nodes = 0
        self._others: set[tuple[str, ...]] = set()
        self._lines: deque[tuple[int, str]] = deque(maxlen=_LINES)
        self._has_lines = asyncio.Event()
        self._directory: Any = None
        self._joined = asyncio.Event()
        self._source: AsyncSource | None = None
        self._spawn(self._run())

    # Methods for the joiner.

    async def describe(self) -> tuple[str, str]:
        """Return the Ray node that this agent runs on, and its broker."""
        return self._place.ray_node, self._broker

    async def lines(self, after: int) -> list[tuple[int, str]]:
        """Wait for lines for the server's log, with numbers above ``after``."""
        while not (found := [line for line in self._lines if line[0] > after]):
            self._has_lines.clear()
            await self._has_lines.wait()
        return found

    # Methods for the directory.

    async def hold(self) -> None:
        """Wait for ever: a call of this fails when this agent ends."""
        await asyncio.Event().wait()

    async def state(self) -> Statement:
        """State what the broker holds, and which builds run here."""
        self._held = {
            key: _Held(self._memo.versions.get(object_id, Version(0, object_id)), object_id, nbytes)
            for key, object_id, nbytes in await self._listed()
        }
        self._memo.keep_only({found.object_id for found in self._held.values()})
        holdings = tuple(Holding(key, found.version, found.nbytes) for key, found in self._held.items())
        builds = tuple(what[1] for what in self._running if isinstance(what, tuple) and what[0] == "build")
        return Statement(self._place.node, self._place.host, self._broker, self._facts, holdings, builds)

    async def doing(self) -> dict[str, Any]:
        """Return the bytes that have come and gone, and the orders that are being carried out."""
        doing = [{**work.doing, "seconds": time.monotonic() - work.since} for work in self._running.values()]
        return {"received": self._received, "sent": self._all_sent(), "doing": doing}

    async def build(self, key: Key, number: int) -> tuple[str, int]:
        """Have the broker build what its callers miss; return the object's id and size."""
        work = self._once(("build", key), {"what": "build"}, key, lambda: self._build(key, number))
        return cast("tuple[str, int]", await work)

    async def prepare(self, key: Key, number: int, payload: bytes) -> tuple[str, int]:
        """Have the broker build a candidate; return its id and size."""
        work = self._once(("prepare", key, number), {"what": "prepare"}, key, lambda: self._prepare(key, payload))
        return cast("tuple[str, int]", await work)

    async def receive(self, order: Receive) -> None:
        """Receive a version from another node."""
        doing = {"what": "receive", "source": order.source, "nbytes": 0, "of": order.nbytes}
        await self._once(("receive", order.key, order.version), doing, order.key, lambda: self._receive(order, doing))

    async def promote(self, key: Key, version: Version) -> None:
        """Make a candidate the current object."""
        await self._once(("promote", key), {"what": "promote"}, key, lambda: self._promote(key, version))

    async def discard(self, key: Key, version: Version) -> None:
        """Give up a candidate, or its receipt."""
        work = self._running.get(("receive", key, version))
        if work is not None:
            work.task.cancel()
        handle = self._candidates.pop((key, version.origin), None)
        if handle is not None:
            await handle.release()

    async def invalidate(self, key: Key) -> None:
        """Drop a call's object."""
        self._held.pop(key, None)
        for found, object_id, _ in await self._listed():
            if found == key:
                await self._client.invalidate_object(object_id)

    # Methods for other agents.

    async def offer(
        self, key: Key, version: Version, receiver: Any, store_nbytes: int, mover: str
    ) -> tuple[int, bytes, int, str]:
        """Get ready to send a version; return the offer's number, the record's header, the size of parts and the mover.

        The offer ends with :meth:`end_offer`, or with the receiver.
        """
        found = self._held.get(key)
        handle = self._candidates.get((key, version.origin))
        if handle is not None:
            object_id = handle.object_id
        elif found is not None and found.version.origin == version.origin:
            object_id = found.object_id
        else:
            raise ClusterError(f"{self._place.node} has no version {version.number} of {key.cache_key}", reason="failed")
        nbytes = part_nbytes(min(store_nbytes, self._place.store_nbytes))
        mover = mover if mover == self._mover else "objects"
        what = (object_id, nbytes, mover)
        async with self._offering:
            if what not in self._sendings:
                self._sendings[what] = Sending(await self._client.export(object_id), nbytes, mover)
            sending, number = self._sendings[what], next(self._numbers)
            sending.receivers.add(number)
        watch = self._spawn(self._end_with(receiver, number))
        self._offers[number] = _Offer(what, sending, watch)
        return number, sending.record.header.to_bytes(), nbytes, mover

    async def part(self, number: int, part: int) -> list[Any]:
        """Return the reference of a part, see :meth:`Sending.part`."""
        offer = self._offers.get(number)
        if offer is None:
            raise ClusterError("the offer has ended", reason="failed")
        return await offer.sending.part(part)

    async def end_offer(self, number: int) -> bytes:
        """End an offer, and return the digest of the record."""
        offer = self._offers.pop(number, None)
        if offer is None:
            return b""
        if offer.watch is not asyncio.current_task():
            offer.watch.cancel()
        digest = offer.sending.digest()
        offer.sending.receivers.discard(number)
        if not offer.sending.receivers and self._sendings.pop(offer.what, None) is not None:
            self._sent += offer.sending.sent
            await offer.sending.close()
        return digest

    async def _end_with(self, receiver: Any, number: int) -> None:
        with contextlib.suppress(*LOST):
            await receiver.hold.remote()
        await self.end_offer(number)

    # Methods for users.

    async def key_of(self, endpoint: str, args: bytes | None, kwargs: bytes | None) -> Key:
        """Return the key of a call; without arguments, one of the endpoint that is no call's.

        :raises EndpointNotFound: if the broker has no such endpoint.
        :raises ConfigurationError: if the call is not cached.
        """
        cache_key = await self._client._run(self._cache_key(endpoint, args, kwargs))
        return self._key_in(await self._client.list_endpoints(), endpoint, cache_key)

    # Lifecycle.

    async def _run(self) -> None:
        """Serve until the broker ends."""
        try:
            async with self._client.source() as self._source, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(self._source))
                tasks.create_task(self._stay_joined())
                tasks.create_task(self._look_regularly())
        except* Exception as group:
            errors = ", ".join(sorted({f"{type(error).__name__}: {error}" for error in _leaves(group)}))
            self._say(f"the agent ends: {errors}")
            _log.warning("the agent of %s ends: %s", self._place.socket, errors)
        with contextlib.suppress(*LOST, ClusterError, TimeoutError):
            async with asyncio.timeout(2.0):
                directory = find(actor_name(self._place.cluster, "directory"))
                await directory.leave.remote(self._place.node, "its broker has ended")
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _listen(self, source: AsyncSource) -> None:
        async for miss in source:
            key = Key(miss.endpoint, miss.cache_key, Group(miss.fingerprint, **self._facts))
            self._misses[key] = miss
            self._spawn(self._answer(key, miss))
        raise ClusterError("the broker has another source of records, or none", reason="replaced")

    async def _stay_joined(self) -> None:
        """Stay registered with the directory; register again when it is replaced."""
        while True:
            try:
                name = actor_name(self._place.cluster, "directory")
                directory = find_or_create(Directory, name, self._place.ray_node, self._place.cluster, soft=True)
                await directory.join.remote(await self.state(), ray.get_runtime_context().current_actor)
                self._directory = directory
                self._joined.set()
                await self._compare()
                await self._publish()
                await directory.hold.remote(self._place.node)
            except LOST as error:
                _log.info("the directory is lost: %s", error)
            self._joined.clear()
            await asyncio.sleep(_PAUSE * random.random())

    async def _answer(self, key: Key, miss: Miss) -> None:
        """Ask the directory for what callers miss, until the miss has an answer."""
        assert self._source is not None, "the miss is of the source"
        self._held.pop(key, None)
        while self._misses.get(key) is miss:
            await self._joined.wait()
            try:
                await self._directory.want.remote(self._place.node, key)
                if self._misses.get(key) is miss and key in self._held:
                    await self._answer_from(miss, self._held[key].object_id)
                    return
            except LOST:
                await asyncio.sleep(0.1)
            except (RayTaskError, SharedRPCError) as error:
                cause: Any = getattr(error, "cause", error)
                if isinstance(cause, Lost):
                    await asyncio.sleep(0.1)
                    continue
                found = unpacked(cause.payload, str(cause)) if isinstance(cause, Failed) else ClusterError(str(cause))
                if self._misses.get(key) is miss:
                    del self._misses[key]
                with contextlib.suppress(ClusterError):  # it has an answer
                    await self._source.fail(miss, found)

    async def _look_regularly(self) -> None:
        """Report what the broker has dropped or replaced by itself, and publish the status."""
        compared = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK)
            known = dict(self._held)
            listed = {key: object_id for key, object_id, _ in await self._listed()}
            for key, found in known.items():
                if self._held.get(key) is found and listed.get(key) != found.object_id and not self._is_busy(key):
                    del self._held[key]
                    if self._joined.is_set():
                        self._directory.dropped.remote(self._place.node, key, found.version)
            if self._joined.is_set() and time.monotonic() - compared > _CENSUS:
                compared = time.monotonic()
                with contextlib.suppress(*LOST):
                    await self._compare()
            await self._publish()

    def _is_busy(self, key: Key) -> bool:
        return any(isinstance(what, tuple) and key in what for what in self._running)

    async def _compare(self) -> None:
        """Count the nodes, and name once each kind that cannot share records with this one, and why."""
        nodes = await self._directory.facts.remote()
        self._nodes = len(nodes)
        for node, facts in nodes.items():
            kind = tuple(facts.values())
            differing = [name for name in self._facts if facts[name] != self._facts[name]]
            if differing and kind not in self._others:
                self._others.add(kind)
                what = ", ".join(f"{name} {facts[name]} there and {self._facts[name]} here" for name in differing)
                self._say(f"{node} has {what}: each of both kinds of nodes builds for itself")

    async def _publish(self) -> None:
        """Have the broker show what this agent is doing."""
        if self._source is None or not self._source.server_id:
            return
        status = ClusterStatus(
            cluster=self._place.cluster,
            node=self._place.node,
            state="joined" if self._joined.is_set() else "looking for the directory",
            nodes=self._nodes,
            objects=len(self._held),
            bytes_received=self._received,
            bytes_sent=self._all_sent(),
            activity=[_described(work.doing) for work in self._running.values()],
        )
        with contextlib.suppress(SharedRPCError):  # if the broker has ended, the source notices it
            await self._source.report(status)

    def _all_sent(self) -> int:
        return self._sent + sum(sending.sent for sending in self._sendings.values())

    def _say(self, line: str) -> None:
        """Print a line in the server's log."""
        self._lines.append((self._lines[-1][0] + 1 if self._lines else 1, line))
        self._has_lines.set()

    # Orders.

    async def _once(self, what: Hashable, doing: dict[str, Any], key: Key, work: Callable[[], Awaitable[Any]]) -> Any:
        """Carry an order out, or join it if it runs already."""
        if what not in self._running:
            doing |= {"endpoint": key.endpoint, "cache_key": key.cache_key}
            running = self._running[what] = _Work(doing)
            running.task = self._spawn(self._carried_out(what, key, work))
        return await asyncio.shield(self._running[what].task)

    async def _carried_out(self, what: Hashable, key: Key, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await work()
        except (ConnectError, ConnectionClosed) as error:
            raise Lost(f"the broker of {self._place.node} does not answer: {error}") from None
        except RemoteError as error:
            raise Failed(str(error), packed(error), endpoint=True) from None
        except SharedRPCError as error:
            self._say(f"{key.cache_key} failed here: {type(error).__name__}: {error}")
            raise Failed(f"{type(error).__name__}: {error}", packed(error)) from None
        except SourceFailed as error:
            self._say(f"{key.cache_key} failed here: {error}")
            raise
        finally:
            del self._running[what]
            self._spawn(self._publish())

    async def _build(self, key: Key, number: int) -> tuple[str, int]:
        """Have the broker build the object of a miss. A run that an earlier agent has begun is awaited."""
        until = time.monotonic() + _BUILD_APPEARS
        while True:
            miss = self._misses.pop(key, None)
            if miss is not None and self._source is not None:
                async with await self._source.build(miss) as handle:
                    return await self._note(key, Version(number, handle.object_id))
            for found, object_id, _ in await self._listed():
                if found == key:
                    return await self._note(key, Version(number, object_id))
            if await self._is_running(key):
                until = time.monotonic() + _BUILD_APPEARS
            elif time.monotonic() > until:
                raise ClusterError(f"no call waits for {key.cache_key} at {self._place.node}", reason="failed")
            await asyncio.sleep(0.1)

    async def _is_running(self, key: Key) -> bool:
        runs = await self._client.list_runs()
        return any(run["cache_key"] == key.cache_key and run["status"] in ("pending", "running") for run in runs)

    async def _note(self, key: Key, version: Version, object_id: str = "") -> tuple[str, int]:
        """Note that a version is current in the broker."""
        object_id = object_id or version.origin
        info = await self._client.get_object_info(object_id)
        self._held[key] = _Held(version, object_id, info["nbytes"])
        self._memo.note(object_id, version)
        return object_id, info["nbytes"]

    async def _prepare(self, key: Key, payload: bytes) -> tuple[str, int]:
        args, kwargs = msgspec.msgpack.decode(payload, type=tuple[bytes, bytes])
        handle = await self._client._run(self._candidate(key.endpoint, args, kwargs), timeout=None)
        self._candidates[key, handle.object_id] = handle
        return handle.object_id, (await self._client.get_object_info(handle.object_id))["nbytes"]

    async def _promote(self, key: Key, version: Version) -> None:
        handle = self._candidates.pop((key, version.origin), None)
        if handle is None:
            if key in self._held and self._held[key].version == version:
                return
            raise ClusterError("the candidate is not there any more", reason="failed")
        try:
            generation = await self._client.promote(handle)
            await self._note(key, version, generation.object_id)
            miss = self._misses.get(key)
            if miss is not None:
                await self._answer_from(miss, generation.object_id)
        finally:
            await handle.release()

    async def _answer_from(self, miss: Miss, object_id: str) -> None:
        """Answer a miss with a copy of an object that has become current since."""
        assert self._source is not None, "the miss is of the source"
        with contextlib.suppress(ClusterError):  # it has an answer
            async with await self._client.export(object_id) as record, await self._source.adopt(miss, record):
                pass

    # Transfers.

    async def _receive(self, order: Receive, doing: dict[str, Any]) -> None:
        key, version = order.key, order.version
        what = (key, version.origin)
        if what in self._candidates:
            if not order.candidate:
                await self._promote(key, version)
            return
        if not order.candidate and key in self._held and self._held[key].version == version:
            return
        async with await self._received_room(order, doing) as room:
            if order.candidate:
                self._candidates[what] = await self._client.adopt_candidate(room)
            else:
                await self._note(key, version, await self._adopt(key, room))

    async def _adopt(self, key: Key, room: AsyncExportedRecord) -> str:
        """Make what was received the current object, and the answer to its miss; return the object's id."""
        miss = self._misses.pop(key, None)
        if miss is not None and self._source is not None:
            try:
                async with await self._source.adopt(miss, room) as handle:
                    return handle.object_id
            except ClusterError as error:
                if error.reason != "answered":
                    raise
            except SharedRPCError:
                self._misses[key] = miss
                raise
        return (await self._client.adopt(room)).object_id

    async def _received_room(self, order: Receive, doing: dict[str, Any]) -> AsyncExportedRecord:
        """Return a room of the broker with the bytes of a version.

        :raises SourceFailed: if the source could not send it, or its digest differs.
        """
        mover, this = self._mover, ray.get_runtime_context().current_actor
        try:
            async with self._offered(order, this) as (number, header, nbytes, mover):
                room = await self._client.allocate(RecordHeader.from_bytes(header))
                try:
                    digests = await self._take_parts(order.agent, number, room, nbytes, mover, doing)
                    async with asyncio.timeout(_ANSWER):
                        if digest_of(digests) != await order.agent.end_offer.remote(number):
                            raise SourceFailed(f"the digests do not fit: what arrived from {order.source} is damaged")
                    return room
                except BaseException:
                    await room.close()
                    raise
        except TimeoutError as error:
            raise SourceFailed(f"{order.source} has not answered in {_ANSWER:g} s") from error
        except RayError as error:
            if mover != "objects":
                self._mover = "objects"
                self._say(f"the object store carries records from now on: {mover} failed, {first_line(error)}")
            cause = getattr(error, "cause", None)
            raise SourceFailed(f"{order.source} failed: {cause or first_line(error)}") from error

    @contextlib.asynccontextmanager
    async def _offered(self, order: Receive, this: Any) -> AsyncIterator[tuple[int, bytes, int, str]]:
        async with asyncio.timeout(_ANSWER):
            offer = await order.agent.offer.remote(order.key, order.version, this, self._place.store_nbytes, self._mover)
        try:
            yield offer
        finally:
            with contextlib.suppress(*LOST):
                order.agent.end_offer.remote(offer[0])

    async def _take_parts(
        self, source: Any, number: int, room: AsyncExportedRecord, nbytes: int, mover: str, doing: dict[str, Any]
    ) -> list[bytes]:
        """Receive all parts, a few at a time, and return their digests."""
        parts = parts_of([segment.info for segment in room.segments], nbytes)
        digests = [b""] * len(parts)
        waiting = in_turn(len(parts), number)
        under_way: deque[tuple[int, asyncio.Task[Any]]] = deque()

        async def fetched(index: int) -> Any:
            async with asyncio.timeout(_ANSWER):
                [reference] = await source.part.remote(number, index)
                return await reference if mover == "objects" else reference

        def ask_ahead() -> None:
            while len(under_way) <= _AHEAD and (index := next(waiting, None)) is not None:
                under_way.append((index, asyncio.create_task(fetched(index))))

        try:
            ask_ahead()
            while under_way:
                index, task = under_way[0]
                given = await task
                under_way.popleft()
                ask_ahead()
                digests[index] = await _uninterrupted(asyncio.to_thread(take, given, room, parts[index], mover))
                del given, task
                doing["nbytes"] += parts[index].nbytes
                self._received += parts[index].nbytes
        finally:
            for _, task in under_way:
                task.cancel()
        return digests

    # The broker.

    async def _listed(self) -> list[tuple[Key, str, int]]:
        """Return the objects that are current in the broker, with their keys and sizes."""
        endpoints = await self._client.list_endpoints()
        return [
            (self._key_in(endpoints, found["endpoint"], found["cache_key"]), found["object_id"], found["nbytes"])
            for found in await self._client.list_objects()
            if found["kind"] == "result" and found["cached"] and found["cache_key"] is not None and not found["stale"]
            if found["endpoint"] in endpoints and endpoints[found["endpoint"]]["managed"]
        ]

    def _key_in(self, endpoints: dict[str, EndpointInfo], endpoint: str, cache_key: str) -> Key:
        return Key(endpoint, cache_key, Group(endpoints[endpoint]["fingerprint"], **self._facts))

    def _cache_key(self, endpoint: str, args: bytes | None, kwargs: bytes | None) -> Operation[str]:
        """Return the cache key of a call, whose arguments are as they travel."""
        reply = yield from ask(Request(m.ListEndpoints(), "list_endpoints", again=True), m.Endpoints)
        spec = next((found for found in reply.endpoints if found.name == endpoint), None)
        if spec is None:
            raise EndpointNotFound(f"{self._broker} of {self._place.node} has no endpoint {endpoint!r}")
        if args is None or kwargs is None:
            return ""
        found = key_of(spec, *decode_call(msgspec.Raw(args), msgspec.Raw(kwargs))) if spec.cache and spec.managed else None
        if found is None:
            raise ConfigurationError(
                f"this call of {endpoint!r} is no object that a cluster shares: share the endpoint with managed=True and "
                f"cache=True, or with a cache_format_key"
            )
        return found

    def _candidate(self, endpoint: str, args: bytes, kwargs: bytes) -> Operation[Any]:
        """Return a handle of a candidate that the broker builds."""
        what = f"prepare({endpoint!r})"
        message = x.PrepareCandidate(endpoint, msgspec.Raw(args), msgspec.Raw(kwargs), sealed=True)
        reply = yield from ask(Request(message, what), x.Candidate)
        return (yield from held(reply.generation))

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Log the exception of a background task."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, (Lost, Failed, SourceFailed, SharedRPCError, *LOST)):
            _log.error("the agent failed", exc_info=error)


async def _uninterrupted(work: Awaitable[Any]) -> Any:
    """Wait for a thread, which may write to the room, even if this is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])


def _described(doing: dict[str, Any]) -> str:
    text = f"{doing['what']} {doing['cache_key']}"
    return f"{text} from {doing['source']}, {doing['nbytes']} of {doing['of']} bytes" if "of" in doing else text


def _leaves(group: BaseExceptionGroup[Exception]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
