"""The agent of a node: it answers the misses of its broker as the directory decides, and transfers records between brokers.

It is a Ray actor, and not the parent of the broker: if one of them is killed, the other continues. It runs no user code,
unpickles no user data, and needs no torch for host memory. Ray repeats the calls that a lost agent or directory has not
answered, so every order is idempotent: it joins the same order if that is running, and does nothing if it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from shared_rpc.client.exported import ExportedRecord
from shared_rpc.client.steps import Lend, Operation, Request, ask
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
from shared_rpc.operations.handles import AsyncHandle
from shared_rpc.protocol import exported as x
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.infos import ClusterStatus
from shared_rpc.protocol.sources import Miss
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.values import decode_call
from shared_rpc.settings import change_environment
from shared_rpc_ray.directory import Directory
from shared_rpc_ray.membership import Tasks, actor_name, find_or_create, first_line, got
from shared_rpc_ray.messages import Call, Group, Held, Key, Lost, Place, SourceFailed, Statement, Transfer, Version
from shared_rpc_ray.transfer import Sending, in_turn, parts_of, take

_log = logging.getLogger("shared_rpc_ray")

#: Seconds to wait for the broker, which ran when the agent was created; short, to detect its exit soon.
_CONNECT = 1.0
#: Maximum number of seconds between two reports to the directory.
_LOOK = 2.0
#: Parts that a receiver requests or writes at a time.
_AT_ONCE = 3
#: Timeout for a part, in seconds: the source's answer and the transfer by Ray.
_ANSWER = 60.0
#: Seconds between two attempts to find a lost directory, or the result of an earlier agent's build.
_PAUSE = 0.2


def order(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Make calls of a method join a running call with the same key and version."""

    @functools.wraps(method)
    async def joined(self: NodeAgent, key: Key, version: Version | int, *arguments: Any) -> Any:
        what = (method.__name__, key, version)
        if what not in self._running:
            self._running[what] = self._tasks.spawn(self._carry_out(what, method(self, key, version, *arguments)))
        return await asyncio.shield(self._running[what])

    return joined


class NodeAgent:
    """The agent of a node. All methods are coroutines of one loop; bytes are copied in threads.

    :param environ: environment variables to take over from the joiner.
    """

    async def __init__(self, place: Place, environ: dict[str, str | None]) -> None:  # type: ignore[misc]  # Ray awaits it
        change_environment(environ)
        self._client = AsyncClient(socket_path=place.socket, timeout=None, connect_timeout=_CONNECT)
        info = await self._client.get_server_info()
        devices = {found["id"]: found for found in await self._client.list_devices()}
        device = "cpu" if info["device"] == "cpu" else devices[info["device"]]["name"]
        self._place = msgspec.structs.replace(place, facts={"device": device, **place.facts})
        self._broker = f"{place.socket} (pid {info['pid']})"
        self._held: dict[Key, Held] = {}
        #: The origin and the handle of each candidate.
        self._candidates: dict[Key, tuple[str, AsyncHandle[Generation]]] = {}
        #: The latest miss of each key, until it has an answer.
        self._misses: dict[Key, Miss] = {}
        #: Running orders, by method, key and version.
        self._running: dict[tuple[str, Key, Version | int], asyncio.Task[Any]] = {}
        #: Open records for receivers, by version, size of parts and mover.
        self._sendings: dict[tuple[Version, int, str], Sending] = {}
        self._exporting = asyncio.Lock()
        self._received_nbytes = self._sent_nbytes = self._nodes = 0
        self._directory: Any = None
        self._joined = asyncio.Event()
        #: Set when there is something to report.
        self._changed = asyncio.Event()
        self._source = self._client.source()
        self._tasks = Tasks()
        await self.state()  # Ray may repeat orders as soon as this returns
        self._serving = self._tasks.spawn(self._serve())

    # Methods for the directory, and for the joiner.

    async def hold(self) -> str:
        """Wait until this agent ends by itself, and return the reason. The call fails when the agent is permanently lost."""
        return await asyncio.shield(self._serving)

    async def state(self) -> Statement:
        """Return the place of this agent, the objects of its broker, and the running builds."""
        known = {held.object_id: held.version for held in self._held.values()}
        self._held = {
            key: Held(known.get(object_id, Version(0, object_id, nbytes)), object_id)
            for key, object_id, nbytes in await self._listed()
        }
        builds = tuple(key for what, key, _ in self._running if what == "build")
        return Statement(self._place, self._broker, self._held, builds)

    @order
    async def build(self, key: Key, number: int) -> Version:
        """Build the object of a miss in the broker, or wait for the run that an earlier agent started; return the version."""
        while True:
            miss = self._misses.pop(key, None)
            if miss is not None:
                try:
                    async with await self._source.build(miss) as handle:
                        nbytes = (await self._client.get_object_info(handle.object_id))["nbytes"]
                        return self._note(key, Version(number, handle.object_id, nbytes), handle.object_id)
                except ClusterError as error:
                    if error.reason != "answered":
                        raise
            runs = any(run["cache_key"] == key.cache_key for run in await self._client.list_runs())
            for found, object_id, nbytes in await self._listed():
                if found == key:
                    return self._note(key, Version(number, object_id, nbytes), object_id)
            if not runs:
                raise ClusterError(f"no call waits for {key.cache_key} at {self._place.node}")
            await asyncio.sleep(_PAUSE)

    @order
    async def prepare(self, key: Key, number: int, payload: bytes) -> Version:
        """Build a candidate in the broker; return its version."""
        await self.discard(key)
        args, kwargs = msgspec.msgpack.decode(payload, type=Call)
        handle = await self._client._run(_candidate(key.endpoint, args, kwargs))
        self._candidates[key] = handle.object_id, handle
        return Version(number, handle.object_id, handle.value.nbytes)

    @order
    async def receive_candidate(self, key: Key, version: Version, transfer: Transfer, agent: Any) -> None:
        """Receive a version from another node's agent as a candidate."""
        if self._candidates.get(key, ("", None))[0] == version.origin:
            return
        await self.discard(key, version)  # a candidate of a lost directory
        with await self._received(key, version, transfer, agent) as record:
            self._candidates[key] = version.origin, await self._client.adopt_candidate(record)

    @order
    async def receive(self, key: Key, version: Version, transfer: Transfer, agent: Any) -> None:
        """Receive a version from another node's agent, and make it the current object."""
        if not self._is_current(key, version):
            with await self._received(key, version, transfer, agent) as record:
                self._note(key, version, (await self._client.adopt(record)).object_id)

    @order
    async def promote(self, key: Key, version: Version) -> None:
        """Make a candidate the current object."""
        origin, handle = self._candidates.get(key, ("", None))
        if handle is not None and origin == version.origin:
            del self._candidates[key]
            async with handle:
                self._note(key, version, (await self._client.promote(handle)).object_id)
        elif not self._is_current(key, version):
            raise ClusterError(f"version {version.number} of {key.cache_key} is neither a candidate nor current")

    async def discard(self, key: Key, wanted: Version | None = None) -> None:
        """Release the candidate of a key, and cancel the receipt of candidates other than the ``wanted`` version."""
        for what, task in self._running.items():
            if what[:2] == ("receive_candidate", key) and what[2] != wanted:
                task.cancel()
        if key in self._candidates:
            await self._candidates.pop(key)[1].release()

    async def invalidate(self, key: Key) -> None:
        """Drop a call's object."""
        self._held.pop(key, None)
        for found, object_id, _ in await self._listed():
            if found == key:
                await self._client.invalidate_object(object_id)

    async def key_of(self, endpoint: str, call: Call | None) -> Key:
        """Return the key of a call with encoded arguments; for None, a key of the endpoint alone.

        :raises EndpointNotFound: if the broker has no such endpoint.
        :raises ConfigurationError: if the call is not cached.
        """
        endpoints = await self._client.list_endpoints()
        if endpoint not in endpoints:
            raise EndpointNotFound(f"{self._broker} of {self._place.node} has no endpoint {endpoint!r}")
        spec = endpoints[endpoint]
        cache_key: str | None = ""
        if call is not None:
            arguments = decode_call(*map(msgspec.Raw, call))
            cache_key = key_of(spec, *arguments) if spec.cache and spec.managed else None
        if cache_key is None:
            raise ConfigurationError(
                f"this call of {endpoint!r} is not shared in a cluster: share the endpoint with managed=True and "
                f"cache=True, or with a cache_format_key"
            )
        return self._key_in(endpoints, endpoint, cache_key)

    # Methods for other agents.

    async def offer(self, key: Key, version: Version, transfer: Transfer) -> tuple[bytes, int]:
        """Prepare to send a version; return its header, and the number of the receiver's first part."""
        sending = await self._sending(key, version, transfer)
        if transfer.again:
            sending.drop()
        return sending.record.header.to_bytes(), sending.begin()

    async def part(self, key: Key, version: Version, transfer: Transfer, number: int) -> tuple[list[Any], bytes]:
        """Return the reference of a part, in a list because Ray would resolve a bare one, and its digest."""
        sending = await self._sending(key, version, transfer)
        reference, digest = await sending.part(number)
        self._sent_nbytes += sending.parts[number].nbytes
        return [reference], digest

    async def _sending(self, key: Key, version: Version, transfer: Transfer) -> Sending:
        what = (version, transfer.part_nbytes, transfer.mover)
        async with self._exporting:
            if what not in self._sendings:
                origin, candidate = self._candidates.get(key, ("", None))
                found = self._held.get(key)
                if candidate is not None and origin == version.origin:
                    object_id = candidate.object_id
                elif found is not None and found.version.origin == version.origin:
                    object_id = found.object_id
                else:
                    raise ClusterError(f"{self._place.node} has no version {version.number} of {key.cache_key}")
                self._sendings[what] = Sending(await self._client.export(object_id), *what[1:])
            return self._sendings[what]

    # Lifecycle.

    async def _serve(self) -> str:
        """Serve until the broker ends or has another source; return the reason for which this agent ends."""
        reason = ""
        try:
            async with self._source, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                tasks.create_task(self._report_regularly())
        except* Exception as group:
            reason = ", ".join(sorted({f"{type(error).__name__}: {error}" for error in group.exceptions}))
            _log.warning("the agent of %s ends: %s", self._place.socket, reason)
        end = functools.partial(ray.kill, ray.get_runtime_context().current_actor, no_restart=True)
        asyncio.get_running_loop().call_later(_PAUSE, end)  # after the reply of hold()
        return reason

    async def _listen(self) -> None:
        async for miss in self._source:
            key = Key(miss.endpoint, miss.cache_key, Group(miss.fingerprint, **self._place.facts))
            self._misses[key] = miss
            self._tasks.spawn(self._answer(key, miss))
        raise ClusterError("the broker has another source of records, or none", reason="replaced")

    async def _answer(self, key: Key, miss: Miss) -> None:
        """Request a missing object from the directory until it is current here, which answers the miss, or it fails."""
        self._held.pop(key, None)
        while True:
            await self._joined.wait()
            try:
                await got(self._directory.want.remote(self._place.node, key))
                break
            except Lost:
                self._joined.clear()
                self._changed.set()
            except Exception as error:
                with contextlib.suppress(ClusterError):  # the miss is answered already
                    await self._source.fail(miss, error if isinstance(error, SharedRPCError) else ClusterError(str(error)))
                break
        if self._misses.get(key) is miss:
            del self._misses[key]

    async def _report_regularly(self) -> None:
        """Stay registered, report objects that the broker has dropped or replaced, and publish the status."""
        while True:
            self._changed.clear()
            try:
                if not self._joined.is_set():
                    await self._join()
                dropped = await self._dropped()
                self._nodes = await got(self._directory.report.remote(self._place.node, dropped, self._status()))
            except (Lost, RayError) as error:
                _log.info("the directory is lost: %s", error)
                self._joined.clear()
            with contextlib.suppress(SharedRPCError):  # the iteration over misses detects the end of the broker
                await self._source.report(self._status())
            for what, sending in list(self._sendings.items()):
                if sending.idle():
                    del self._sendings[what]
                    await sending.close()
            with contextlib.suppress(TimeoutError):
                if not self._joined.is_set():
                    await asyncio.sleep(_PAUSE * random.random())
                else:
                    await asyncio.wait_for(self._changed.wait(), _LOOK)
                    await asyncio.sleep(_PAUSE)  # lets callers attach first, and combines reports of several orders

    async def _join(self) -> None:
        """Register with the directory, and create it if there is none. A directory restarted by Ray finds its agents itself.

        :raises Lost: if it is permanently lost: the next attempt creates another one.
        """
        name = actor_name(self._place.cluster, "directory")
        directory = find_or_create(Directory, name, self._place.ray_node, self._place.cluster, soft=True)
        await got(directory.join.remote(await self.state(), ray.get_runtime_context().current_actor))
        self._directory = directory
        self._joined.set()

    async def _dropped(self) -> dict[Key, Version]:
        """Remove and return the objects that the broker has dropped or replaced since the last call."""
        known = dict(self._held)
        listed = {key: object_id for key, object_id, _ in await self._listed()}
        busy = {key for _, key, _ in self._running}
        gone = [key for key, found in known.items() if self._held.get(key) is found and listed.get(key) != found.object_id]
        return {key: self._held.pop(key).version for key in gone if key not in busy}

    def _status(self) -> ClusterStatus:
        return ClusterStatus(
            cluster=self._place.cluster,
            node=self._place.node,
            state="joined" if self._joined.is_set() else "connecting to the directory",
            nodes=self._nodes,
            objects=len(self._held),
            bytes_received=self._received_nbytes,
            bytes_sent=self._sent_nbytes,
            activity=[f"{what} {key.cache_key}" for what, key, _ in self._running],
        )

    # Orders.

    async def _carry_out(self, what: tuple[str, Key, Version | int], work: Awaitable[Any]) -> Any:
        try:
            return await work
        except (ConnectError, ConnectionClosed) as error:
            raise Lost(f"the broker of {self._place.node} does not answer: {error}") from None
        except RemoteError:
            raise
        except Exception as error:
            _log.warning("%s of %s failed: %s: %s", what[0], what[1].cache_key, type(error).__name__, error)
            raise error if isinstance(error, SharedRPCError) else ClusterError(f"{type(error).__name__}: {error}") from error
        finally:
            del self._running[what]
            self._changed.set()

    def _is_current(self, key: Key, version: Version) -> bool:
        return key in self._held and self._held[key].version == version

    def _note(self, key: Key, version: Version, object_id: str) -> Version:
        """Note that a version is current in the broker."""
        self._held[key] = Held(version, object_id)
        return version

    async def _received(self, key: Key, version: Version, transfer: Transfer, agent: Any) -> ExportedRecord:
        """Receive a version into memory of the broker, several parts at a time; return the record.

        :raises SourceFailed: if the source could not send it, or a digest differs.
        """
        writers = ThreadPoolExecutor(_AT_ONCE)
        allocated: asyncio.Task[ExportedRecord] | None = None

        async def receive(allocated: asyncio.Task[ExportedRecord]) -> None:
            for number in numbers:
                async with asyncio.timeout(_ANSWER):
                    [given], digest = await agent.part.remote(key, version, transfer, number)
                    given = await given if transfer.mover == "objects" else given
                write = functools.partial(take, given, await allocated, parts[number], transfer.mover)
                if digest != await asyncio.get_running_loop().run_in_executor(writers, write):
                    raise SourceFailed(f"the digests differ: the bytes from {transfer.source} are damaged")
                del given, write  # so that Ray frees the part
                self._received_nbytes += parts[number].nbytes

        try:
            async with asyncio.timeout(_ANSWER):
                encoded, first = await agent.offer.remote(key, version, transfer)
            header = RecordHeader.from_bytes(encoded)
            parts = parts_of(header.segments, transfer.part_nbytes)
            numbers = in_turn(len(parts), first)
            async with asyncio.TaskGroup() as tasks:
                allocated = tasks.create_task(self._client.allocate(header))
                for _ in range(_AT_ONCE):
                    tasks.create_task(receive(allocated))
            return allocated.result()
        except BaseException as problem:
            await asyncio.to_thread(writers.shutdown)  # wait for running writes
            if allocated is not None and not allocated.cancelled() and allocated.exception() is None:
                allocated.result().close()
            error = problem.exceptions[0] if isinstance(problem, BaseExceptionGroup) else problem
            if isinstance(error, TimeoutError):
                raise SourceFailed(f"{transfer.source} has not answered in {_ANSWER:g} s") from error
            if isinstance(error, RayError):
                raise SourceFailed(f"{transfer.source} failed: {getattr(error, 'cause', None) or first_line(error)}") from error
            raise error from None
        finally:
            writers.shutdown(wait=False)

    # The broker.

    async def _listed(self) -> list[tuple[Key, str, int]]:
        """Return the current objects of the broker with their keys, ids and sizes."""
        endpoints = await self._client.list_endpoints()
        return [
            (self._key_in(endpoints, found["endpoint"], found["cache_key"]), found["object_id"], found["nbytes"])
            for found in await self._client.list_objects()
            if found["kind"] == "result" and found["cached"] and found["cache_key"] is not None and not found["stale"]
            if found["endpoint"] in endpoints and endpoints[found["endpoint"]].managed
        ]

    def _key_in(self, endpoints: dict[str, EndpointSpec], endpoint: str, cache_key: str) -> Key:
        return Key(endpoint, cache_key, Group(endpoints[endpoint].fingerprint, **self._place.facts))


def _candidate(endpoint: str, args: bytes, kwargs: bytes) -> Operation[Any]:
    """Build a candidate in the broker, and return its handle."""
    what = f"prepare({endpoint!r})"
    message = x.PrepareCandidate(endpoint, msgspec.Raw(args), msgspec.Raw(kwargs), sealed=True)
    reply = yield from ask(Request(message, what), x.Candidate)
    return (yield Lend(reply.generation, reply.generation))
