"""The agent of a node: it answers the misses of its broker as the directory decides, and transfers records between brokers.

It is an actor of Ray, and the broker is no child of it: either can be killed, and the other goes on. It runs no code of users,
unpickles nothing of theirs, and needs no torch for host memory. Ray repeats the calls that a lost agent or directory has not
answered, so every order can be repeated: what runs already is joined, what is done already is left as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, cast

import msgspec
import ray
from ray.exceptions import RayError

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
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.infos import ClusterStatus, EndpointInfo
from shared_rpc.protocol.sources import Miss
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.values import decode_call
from shared_rpc.settings import change_environment
from shared_rpc_ray.directory import Directory
from shared_rpc_ray.membership import Tasks, actor_name, find_or_create, first_line, got
from shared_rpc_ray.messages import AgentPlace, Group, Held, Key, Lost, Receive, SourceFailed, Statement, Version
from shared_rpc_ray.transfer import Part, Sending, in_turn, part_nbytes, parts_of, take

_log = logging.getLogger("shared_rpc_ray")

#: Seconds to wait for the broker: it ran when the agent was created, and its end is to be noticed soon.
_CONNECT = 1.0
#: Seconds between two comparisons of what the broker holds with what it held, as it evicts and invalidates by itself.
_LOOK = 2.0
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
#: The name of the order that receives a candidate of a refresh.
_CANDIDATE = "receive a candidate of"


class NodeAgent:
    """The agent of a node. All methods are coroutines of one loop; bytes are copied in threads."""

    async def __init__(self, place: AgentPlace) -> None:  # type: ignore[misc]  # Ray awaits it
        change_environment({"CUDA_VISIBLE_DEVICES": place.gpus, "SHARED_TENSOR_SOURCE_TOKEN": place.token})
        self._place = place
        self._client = AsyncClient(socket_path=place.socket, timeout=None, connect_timeout=_CONNECT)
        info = await self._client.get_server_info()
        devices = {found["id"]: found for found in await self._client.list_devices()}
        device = "cpu" if info["device"] == "cpu" else devices[info["device"]]["name"]
        self._facts = {"device": device, **place.facts}
        self._broker = f"{place.socket} (pid {info['pid']})"
        self._held: dict[Key, Held] = {}
        #: The origin and the handle of each candidate.
        self._candidates: dict[Key, tuple[str, AsyncHandle[Any]]] = {}
        #: Misses without an answer.
        self._misses: dict[Key, Miss] = {}
        #: Orders that are being carried out, by what is done, the key and the version.
        self._running: dict[tuple[Any, ...], asyncio.Task[Any]] = {}
        #: Records that are being sent, by object, size of parts and mover.
        self._sendings: dict[tuple[str, int, str], Sending] = {}
        self._exporting = asyncio.Lock()
        self._received = self._sent = self._nodes = 0
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._directory: Any = None
        self._joined = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._source: AsyncSource | None = None
        self._tasks = Tasks()
        await self.state()  # Ray may repeat orders as soon as this returns
        self._tasks.spawn(self._run())

    # Methods for the joiner.

    async def describe(self) -> tuple[str, str]:
        """Return the Ray node that this agent runs on, and its broker."""
        return self._place.ray_node.id, self._broker

    @ray.method(max_task_retries=0)  # type: ignore[untyped-decorator]
    async def line(self) -> str:
        """Wait for the next line for the server's log. Fails with the agent's process: the joiner looks what is left of Ray."""
        return await self._lines.get()

    # Methods for the directory.

    async def hold(self) -> str:
        """Return why this agent ends when it does so by itself. A call of this fails when the agent is lost for good."""
        return await asyncio.shield(self._ended)

    async def state(self) -> Statement:
        """State what the broker holds, and which builds run here."""
        known = {held.object_id: held.version for held in self._held.values()}
        self._held = {
            key: Held(known.get(object_id, Version(0, object_id)), object_id, nbytes)
            for key, object_id, nbytes in await self._listed()
        }
        builds = tuple(what[1] for what in self._running if what[0] == "build")
        return Statement(self._place.node, self._place.ray_node.address, self._broker, self._facts, self._held, builds)

    async def doing(self) -> dict[str, Any]:
        """Return the bytes that have come and gone, and a line for each order that is being carried out."""
        return {"received": self._received, "sent": self._sent, "doing": self._doing()}

    def _doing(self) -> list[str]:
        return [f"{what[0]} {what[1].cache_key}" for what in self._running]

    async def build(self, key: Key, number: int) -> tuple[str, int]:
        """Have the broker build what its callers miss; return the object's id and size."""
        return cast("tuple[str, int]", await self._once(("build", key), lambda: self._build(key, number)))

    async def prepare(self, key: Key, number: int, payload: bytes) -> tuple[str, int]:
        """Have the broker build a candidate; return its id and size."""
        return cast("tuple[str, int]", await self._once(("prepare", key, number), lambda: self._prepare(key, payload)))

    async def receive(self, order: Receive) -> None:
        """Receive a version from another node."""
        if order.candidate:  # one that is still coming is of a directory that was lost
            self._cancel_candidates(order.key, order.version)
        what = _CANDIDATE if order.candidate else "receive"
        await self._once((what, order.key, order.version), lambda: self._receive(order))

    async def promote(self, key: Key, version: Version) -> None:
        """Make a candidate the current object."""
        await self._once(("promote", key), lambda: self._promote(key, version))

    async def discard(self, key: Key, version: Version) -> None:
        """Give up a candidate, or its receipt."""
        self._cancel_candidates(key)
        if self._has_candidate(key, version):
            await self._candidates.pop(key)[1].release()

    def _cancel_candidates(self, key: Key, wanted: Version | None = None) -> None:
        for what, task in self._running.items():
            if what[:2] == (_CANDIDATE, key) and what[2] != wanted:
                task.cancel()

    async def invalidate(self, key: Key) -> None:
        """Drop a call's object."""
        self._held.pop(key, None)
        for found, object_id, _ in await self._listed():
            if found == key:
                await self._client.invalidate_object(object_id)

    # Methods for other agents.

    async def offer(self, order: Receive, store_nbytes: int, mover: str) -> tuple[str, bytes, int, str, int]:
        """Get ready to send a version; return the object's id, the header, the parts' size, the mover and the first part."""
        key, version = order.key, order.version
        found = self._held.get(key)
        if self._has_candidate(key, version):
            object_id = self._candidates[key][1].object_id
        elif found is not None and found.version.origin == version.origin:
            object_id = found.object_id
        else:
            raise ClusterError(f"{self._place.node} has no version {version.number} of {key.cache_key}")
        nbytes = part_nbytes(min(store_nbytes, self._place.ray_node.store_nbytes))
        mover = mover if mover == self._place.mover and not order.again else "objects"
        sending = await self._sending(object_id, nbytes, mover)
        if order.again:
            sending.drop()
        return object_id, sending.record.header.to_bytes(), nbytes, mover, sending.begin()

    async def part(self, object_id: str, nbytes: int, mover: str, number: int) -> tuple[list[Any], bytes]:
        """Return the reference of a part, in a list because Ray would resolve a bare one, and its digest."""
        sending = await self._sending(object_id, nbytes, mover)
        reference, digest = await sending.part(number)
        self._sent += sending.parts[number].nbytes
        return [reference], digest

    async def _sending(self, object_id: str, nbytes: int, mover: str) -> Sending:
        what = (object_id, nbytes, mover)
        async with self._exporting:
            if what not in self._sendings:
                record = await self._client.export(object_id)
                self._sendings[what] = Sending(
                    record, nbytes, mover, lambda: self._tasks.spawn(self._sendings.pop(what).close())
                )
            return self._sendings[what]

    # Methods for users.

    async def key_of(self, endpoint: str, call: tuple[bytes, bytes] | None) -> Key:
        """Return the key of a call, whose arguments are as they travel; without one, a key that is no call's.

        :raises EndpointNotFound: if the broker has no such endpoint.
        :raises ConfigurationError: if the call is not cached.
        """
        endpoints = await self._client.list_endpoints()
        if endpoint not in endpoints:
            raise EndpointNotFound(f"{self._broker} of {self._place.node} has no endpoint {endpoint!r}")
        spec = msgspec.convert(endpoints[endpoint], EndpointSpec)
        cache_key: str | None = ""
        if call is not None:
            arguments = decode_call(*map(msgspec.Raw, call))
            cache_key = key_of(spec, *arguments) if spec.cache and spec.managed else None
        if cache_key is None:
            raise ConfigurationError(
                f"this call of {endpoint!r} is no object that a cluster shares: share the endpoint with managed=True and "
                f"cache=True, or with a cache_format_key"
            )
        return self._key_in(endpoints, endpoint, cache_key)

    # Lifecycle.

    async def _run(self) -> None:
        """Serve until the broker ends."""
        try:
            async with self._client.source() as self._source, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(self._source))
                tasks.create_task(self._look_regularly())
        except* Exception as group:
            errors = ", ".join(sorted({f"{type(error).__name__}: {error}" for error in group.exceptions}))
            self._say(f"the agent ends: {errors}")
            _log.warning("the agent of %s ends: %s", self._place.socket, errors)
        self._ended.set_result("its broker has ended")
        await asyncio.sleep(_PAUSE)  # the answer is sent
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _listen(self, source: AsyncSource) -> None:
        async for miss in source:
            key = Key(miss.endpoint, miss.cache_key, Group(miss.fingerprint, **self._facts))
            self._misses[key] = miss
            self._tasks.spawn(self._answer(key, miss))
        raise ClusterError("the broker has another source of records, or none", reason="replaced")

    async def _join(self) -> None:
        """Register with the directory, which is created where there is none. Ray restarts it; it finds its agents then.

        :raises Lost: if it is gone for good: the next attempt creates another one.
        """
        name = actor_name(self._place.cluster, "directory")
        directory = find_or_create(Directory, name, self._place.ray_node.id, self._place.cluster, soft=True)
        for line in await got(directory.join.remote(await self.state(), ray.get_runtime_context().current_actor)):
            self._say(line)
        self._directory = directory
        self._joined.set()

    async def _answer(self, key: Key, miss: Miss) -> None:
        """Ask the directory for what callers miss, until the miss has an answer."""
        assert self._source is not None, "the miss is of the source"
        self._held.pop(key, None)
        while self._misses.get(key) is miss:
            await self._joined.wait()
            try:
                await got(self._directory.want.remote(self._place.node, key))
                if self._misses.get(key) is miss and key in self._held:
                    await self._answer_from(miss, self._held[key].object_id)
                    return
            except Lost:  # it is gone for good, or does not know this node
                await asyncio.sleep(_PAUSE * random.random())
                with contextlib.suppress(Lost, RayError):
                    await self._join()
            except Exception as error:
                if self._misses.get(key) is miss:
                    del self._misses[key]
                with contextlib.suppress(ClusterError):  # it has an answer
                    await self._source.fail(miss, error if isinstance(error, SharedRPCError) else ClusterError(str(error)))

    async def _look_regularly(self) -> None:
        """Stay registered; report what the broker has dropped or replaced by itself, and publish the status."""
        while True:
            try:
                if not self._joined.is_set():
                    await self._join()
                self._nodes = await got(self._directory.report.remote(self._place.node, await self._dropped()))
            except (Lost, RayError) as error:
                _log.info("the directory is lost: %s", error)
                self._joined.clear()
            await self._publish()
            await asyncio.sleep(_LOOK if self._joined.is_set() else _PAUSE * random.random())

    async def _dropped(self) -> dict[Key, Version]:
        """Forget what the broker has dropped or replaced by itself since the last time, and return it."""
        known = dict(self._held)
        listed = {key: object_id for key, object_id, _ in await self._listed()}
        busy = {what[1] for what in self._running}
        gone = [key for key, found in known.items() if self._held.get(key) is found and listed.get(key) != found.object_id]
        return {key: self._held.pop(key).version for key in gone if key not in busy}

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
            bytes_sent=self._sent,
            activity=self._doing(),
        )
        with contextlib.suppress(SharedRPCError):  # if the broker has ended, the source notices it
            await self._source.report(status)

    def _say(self, line: str) -> None:
        """Print a line in the server's log."""
        if self._lines.qsize() == _LINES:
            self._lines.get_nowait()
        self._lines.put_nowait(line)

    # Orders.

    async def _once(self, what: tuple[Any, ...], work: Callable[[], Awaitable[Any]]) -> Any:
        """Carry an order out, or join it if it runs already. ``what`` begins with the order and its key."""
        if what not in self._running:
            self._running[what] = self._tasks.spawn(self._carried_out(what, work))
        return await asyncio.shield(self._running[what])

    async def _carried_out(self, what: tuple[Any, ...], work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await work()
        except (ConnectError, ConnectionClosed) as error:
            raise Lost(f"the broker of {self._place.node} does not answer: {error}") from None
        except RemoteError:
            raise
        except (SourceFailed, SharedRPCError) as error:
            self._say(f"{what[1].cache_key} failed here: {type(error).__name__}: {error}")
            raise
        finally:
            del self._running[what]
            self._tasks.spawn(self._publish())

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
            runs = await self._client.list_runs()
            if any(run["cache_key"] == key.cache_key and run["status"] in ("pending", "running") for run in runs):
                until = time.monotonic() + _BUILD_APPEARS
            elif time.monotonic() > until:
                raise ClusterError(f"no call waits for {key.cache_key} at {self._place.node}")
            await asyncio.sleep(0.1)

    async def _note(self, key: Key, version: Version, object_id: str = "") -> tuple[str, int]:
        """Note that a version is current in the broker."""
        object_id = object_id or version.origin
        info = await self._client.get_object_info(object_id)
        self._held[key] = Held(version, object_id, info["nbytes"])
        return object_id, info["nbytes"]

    async def _prepare(self, key: Key, payload: bytes) -> tuple[str, int]:
        args, kwargs = msgspec.msgpack.decode(payload, type=tuple[bytes, bytes])
        handle = await self._client._run(_candidate(key.endpoint, args, kwargs))
        await self._keep_candidate(key, handle.object_id, handle)
        return handle.object_id, (await self._client.get_object_info(handle.object_id))["nbytes"]

    def _has_candidate(self, key: Key, version: Version) -> bool:
        return key in self._candidates and self._candidates[key][0] == version.origin

    async def _keep_candidate(self, key: Key, origin: str, handle: AsyncHandle[Any]) -> None:
        """Keep the candidate of a key, in place of one that a refresh without an end has left."""
        _, earlier = self._candidates.get(key, ("", None))
        self._candidates[key] = origin, handle
        if earlier is not None:
            await earlier.release()

    async def _promote(self, key: Key, version: Version) -> None:
        if not self._has_candidate(key, version):
            if key in self._held and self._held[key].version == version:
                return
            raise ClusterError("the candidate is not there any more")
        _, handle = self._candidates.pop(key)
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

    async def _receive(self, order: Receive) -> None:
        key, version = order.key, order.version
        if self._has_candidate(key, version):
            if not order.candidate:
                await self._promote(key, version)
            return
        if not order.candidate and key in self._held and self._held[key].version == version:
            return
        async with await self._received_room(order) as room:
            if order.candidate:
                await self._keep_candidate(key, version.origin, await self._client.adopt_candidate(room))
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

    async def _received_room(self, order: Receive) -> AsyncExportedRecord:
        """Return a room of the broker with the bytes of a version, of which a few parts are under way at a time.

        :raises SourceFailed: if the source could not send it, or a digest differs.
        """
        ahead: deque[tuple[Part, asyncio.Task[tuple[Any, bytes]]]] = deque()
        room: AsyncExportedRecord | None = None

        async def fetched(number: int) -> tuple[Any, bytes]:
            async with asyncio.timeout(_ANSWER):
                [reference], digest = await order.agent.part.remote(object_id, nbytes, mover, number)
                return (await reference if mover == "objects" else reference), digest

        def fetch(count: int) -> None:
            ahead.extend((parts[number], asyncio.create_task(fetched(number))) for number in islice(numbers, count))

        try:
            async with asyncio.timeout(_ANSWER):
                offer = await order.agent.offer.remote(order, self._place.ray_node.store_nbytes, self._place.mover)
            object_id, encoded, nbytes, mover, first = offer
            header = RecordHeader.from_bytes(encoded)
            parts = parts_of(header.segments, nbytes)
            numbers = in_turn(len(parts), first)
            fetch(_AHEAD)
            room = await self._client.allocate(header)
            while ahead:
                part, task = ahead.popleft()
                given, digest = await task
                fetch(1)
                if digest != await _uninterrupted(asyncio.to_thread(take, given, room, part, mover)):
                    raise SourceFailed(f"the digests do not fit: what arrived from {order.source} is damaged")
                del given, task  # Ray frees the part
                self._received += part.nbytes
            return room
        except BaseException as error:
            for _, task in ahead:
                task.cancel()
            if room is not None:
                await room.close()
            if isinstance(error, TimeoutError):
                raise SourceFailed(f"{order.source} has not answered in {_ANSWER:g} s") from error
            if isinstance(error, RayError):
                raise SourceFailed(f"{order.source} failed: {getattr(error, 'cause', None) or first_line(error)}") from error
            raise

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


def _candidate(endpoint: str, args: bytes, kwargs: bytes) -> Operation[Any]:
    """Return a handle of a candidate that the broker builds."""
    what = f"prepare({endpoint!r})"
    message = x.PrepareCandidate(endpoint, msgspec.Raw(args), msgspec.Raw(kwargs), sealed=True)
    reply = yield from ask(Request(message, what), x.Candidate)
    return (yield from held(reply.generation))


async def _uninterrupted(work: Awaitable[Any]) -> Any:
    """Wait for a thread, which may write to the room, even if this is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
