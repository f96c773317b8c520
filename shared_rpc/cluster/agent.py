"""The agent of a node: it answers the misses of its broker as the directory decides, and moves records between brokers.

It is an actor of Ray, and the broker beside it is no child of it: either can be killed, and the other goes on. It runs no code
of users and unpickles nothing of theirs; for host memory it needs no torch. Its own state can be lost: what the broker holds,
and the
:class:`~shared_rpc.cluster.memo.Memo` beside its socket, tell the next agent all that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Coroutine
from typing import Any

import msgspec
import ray
from ray.exceptions import RayTaskError

from shared_rpc.client.exported import AsyncExportedRecord
from shared_rpc.client.handle import AsyncHandle
from shared_rpc.client.steps import Operation, Request, ask
from shared_rpc.cluster.agreement import movers_of
from shared_rpc.cluster.directory import Rules
from shared_rpc.cluster.directory_actor import DirectoryActor
from shared_rpc.cluster.holdings import Holdings, Listed
from shared_rpc.cluster.membership import LOST, actor_name, find, find_or_create
from shared_rpc.cluster.memo import Memo
from shared_rpc.cluster.movers import DamagedPart, Mover, MoverFailed, Part
from shared_rpc.cluster.offers import NOT_YET, Offer, Offers, Put
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
    Group,
    Holding,
    Invalidate,
    InvalidationRequested,
    Key,
    KeyResult,
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
from shared_rpc.cluster.place import AgentPlace
from shared_rpc.cluster.receipts import Receipt
from shared_rpc.errors import (
    ClusterError,
    ConfigurationError,
    ConnectError,
    ConnectionClosed,
    EndpointNotFound,
    RemoteError,
    SharedRPCError,
    from_wire,
    to_wire,
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
from shared_rpc.settings import act_for_joiner

__all__ = ["NodeAgent"]

_log = logging.getLogger("shared_rpc.cluster")

#: Seconds to wait for the broker: it was there when the agent was made, and one that has gone is to be noticed soon.
_CONNECT = 1.0
#: Seconds between two looks at what the broker holds, as it evicts and invalidates by itself.
_LOOK = 2.0
#: Seconds between two questions how many nodes there are.
_CENSUS = 30.0
#: Parts that a receiver has under way while it writes another one.
_WINDOW = 2
#: Seconds after which what has arrived is given up, where nobody has ordered the rest.
_IDLE_RECEIPT = 120.0
#: Seconds in which a source answers. One that waits for a part itself says so sooner.
_ANSWER = Rules().silence
#: Lines of the agent that its joiner has not read yet; older ones are dropped.
_LINES = 1000
#: Seconds to wait before a lost directory is looked for again, at most.
_PAUSE = 0.5


class _Failed(Exception):
    """An order that cannot be carried out, with the blame, and the exception as it travels."""

    def __init__(self, message: str, blame: Blame, payload: bytes = b"") -> None:
        super().__init__(message)
        self.blame = blame
        self.payload = payload


class NodeAgent:
    """The agent of a node. All methods are coroutines of one loop; bytes are copied in threads."""

    async def __init__(self, place: AgentPlace) -> None:  # type: ignore[misc]  # Ray awaits it
        act_for_joiner(place.gpus, place.token)
        self._place = place
        self._life = secrets.token_hex(8)
        self._client = AsyncClient(socket_path=place.socket, timeout=None, connect_timeout=_CONNECT)
        info = await self._client.get_server_info()
        devices = {found["id"]: found for found in await self._client.list_devices()}
        device = place.facts.get("device") or ("cpu" if info["device"] == "cpu" else devices[info["device"]]["name"])
        self._group = {**place.facts, "device": device}
        self._broker = f"{place.socket} (pid {info['pid']})"
        self._facts = NodeFacts(
            place.host, device, place.facts["python"], place.facts["torch"], place.facts["shared_rpc"], self._broker
        )
        self._movers = movers_of(place.mover, device)
        self._memo = Memo(place.socket)
        self._endpoints: dict[str, EndpointInfo] = {}
        self._holdings = Holdings(self._memo)
        self._source: AsyncSource | None = None
        #: Misses without an answer, by key.
        self._misses: dict[Key, Miss] = {}
        #: Orders that are being carried out, by id.
        self._orders: dict[int, Order] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        #: What is being received, and candidates, by key and digest: a version's number may be learnt later.
        self._receipts: dict[tuple[Key, str], Receipt] = {}
        self._candidates: dict[tuple[Key, str], tuple[Version, AsyncHandle[Any]]] = {}
        self._offers = Offers(place.node, place.store_nbytes, self._client, self._movers, ray.put)
        #: Set, and replaced, when a record begins to arrive.
        self._has_more = asyncio.Event()
        self._numbers = itertools.count(1)
        #: What goes to the directory, in order.
        self._events: list[ClusterEvent] = []
        self._has_events = asyncio.Event()
        self._directory: Any = None
        #: Not set while the directory is being joined, whose first decisions may be here before its epoch is.
        self._knows_epoch = asyncio.Event()
        self._nodes = 0
        self._epoch = ""
        self._rejoin = asyncio.Event()
        #: Requests of users that the directory has not answered, with the event that repeats them.
        self._requests: dict[str, tuple[ClusterEvent, asyncio.Future[tuple[KeyResult, ...]]]] = {}
        self._lines: deque[tuple[int, str]] = deque(maxlen=_LINES)
        self._has_lines = asyncio.Event()
        #: Bytes, by mover.
        self._received: Counter[str] = Counter()
        self._others: set[NodeFacts] = set()
        self._main = asyncio.create_task(self._run())

    # What the joiner calls.

    async def describe(self) -> tuple[str, str]:
        """Return the Ray node that this agent runs on, and its broker."""
        return self._place.ray_node, self._broker

    async def lines(self, after: int) -> list[tuple[int, str]]:
        """Wait for lines for the server's log, with numbers above ``after``."""
        while not (found := [line for line in self._lines if line[0] > after]):
            self._has_lines.clear()
            await self._has_lines.wait()
        return found

    # What the directory calls.

    async def hold(self) -> None:
        """Wait for ever: a call of this ends with this agent."""
        await asyncio.Event().wait()

    async def carry_out(self, epoch: str, decisions: list[Decision]) -> None:
        """Begin to carry out decisions; those of an earlier directory are of no use."""
        await self._knows_epoch.wait()
        if epoch != self._epoch:
            return
        for decision in decisions:
            self._begin(decision)

    # What other agents call.

    async def offer(self, receiver: Any, order: Fetch, movers: tuple[str, ...], store_nbytes: int) -> Offer | None:
        """Get ready to send a version; return None if this node is to receive it itself, and that has not begun.

        :param receiver: the agent that carries the order out. With that, or with the agent, the offer ends.
        :param movers: those that the receiver has, the best first.
        :param store_nbytes: the size of the receiver's object store.
        :raises ClusterError: if it is not here.
        """
        offer = await self._offer(order, movers, store_nbytes)
        if offer is not None:
            self._spawn(self._end_with(receiver, order, offer.number))
        return offer

    async def _offer(self, order: Fetch, movers: tuple[str, ...], store_nbytes: int) -> Offer | None:
        key, version, relay = order.key, order.version, order.relay
        what, until = (key, version.digest), time.monotonic() + NOT_YET
        while True:
            _, handle = self._candidates.get(what, (None, None))
            object_id = handle.object_id if handle is not None else self._holdings.object_of(key, version)
            if object_id is not None:
                return await self._offers.of_object(object_id, movers, store_nbytes)
            if relay and (receipt := self._receipts.get(what)) is not None:
                return self._offers.of_receipt(receipt, movers, store_nbytes)
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic()) if relay else 0.0):
                    await self._has_more.wait()
            except TimeoutError:
                if relay and self._orders_of(what):
                    return None
                raise ClusterError(
                    f"{self._place.node} has no version {version.number} of {key.cache_key}", reason="failed"
                ) from None

    async def _end_with(self, receiver: Any, order: Fetch, number: int) -> None:
        """End an offer when its receiver has ended, or the order there: nothing that was kept for it stays."""
        with contextlib.suppress(*LOST):
            await receiver.receiving.remote(order.id)
        with contextlib.suppress(SharedRPCError):  # the broker has gone: that is noticed elsewhere
            await self._offers.end(number)

    async def receiving(self, order: int) -> None:
        """Wait until an order is carried out here no more: a call of this fails when this agent has ended."""
        task = self._tasks.get(order)
        if task is not None:
            await asyncio.wait([task])

    async def offered(self, number: int) -> None:
        """Wait until an offer has ended: a call of this fails when this agent has."""
        await self._offers.ended(number)

    async def part(self, number: int, part: Part) -> Any:
        """Return what the mover makes of a part, or where that is; None if it has not arrived here yet.

        :raises ClusterError: if the offer has ended.
        """
        return await self._offers.part(number, part)

    async def end_offer(self, number: int) -> None:
        """Release a record that was offered."""
        await self._offers.end(number)

    # What users call, by `shared_rpc.cluster`.

    async def key_of(self, endpoint: str, args: bytes | None, kwargs: bytes | None) -> Key:
        """Return the key of a call; without arguments, one of the endpoint that is no call's.

        :raises EndpointNotFound: if the broker has no such endpoint.
        :raises ConfigurationError: if the call is not cached.
        """
        cache_key = await self._client._run(self._cache_key(endpoint, args, kwargs))
        return await self._key(endpoint, cache_key)

    async def refresh(self, endpoint: str, cache_key: str, payload: bytes, key: Key) -> tuple[KeyResult, ...]:
        """Have every node that has a call get a new version of it; return what came of it."""
        request = f"{self._place.node}/{self._life}/{next(self._numbers)}"
        return await self._ask(request, RefreshRequested(self._place.node, request, endpoint, cache_key, payload, key))

    async def invalidate(self, endpoint: str, cache_key: str | None) -> tuple[KeyResult, ...]:
        """Have every node forget a call, or all calls of an endpoint."""
        request = f"{self._place.node}/{self._life}/{next(self._numbers)}"
        return await self._ask(request, InvalidationRequested(self._place.node, request, endpoint, cache_key))

    # Its own life.

    async def _run(self) -> None:
        """Serve until the broker has ended, and end then: who starts the broker anew has another agent made."""
        try:
            async with self._client.source() as self._source, asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(self._source))
                tasks.create_task(self._stay_joined())
                tasks.create_task(self._look_regularly())
        except* Exception as group:
            errors = ", ".join(sorted({f"{type(error).__name__}: {error}" for error in _leaves(group)}))
            self._say(f"the agent ends: {errors}")
            _log.warning("the agent of %s ends: %s", self._place.socket, errors)
        await self._end()

    async def _end(self) -> None:
        """Leave the cluster, and end this process for good."""
        with contextlib.suppress(*LOST, ClusterError, TimeoutError):
            async with asyncio.timeout(2.0):
                directory = find(actor_name(self._place.cluster, "directory"))
                await directory.report.remote(
                    self._place.node, self._life, [NodeLeft(self._place.node, "its broker has ended")]
                )
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _say(self, line: str) -> None:
        """Have a line in the server's log."""
        number = self._lines[-1][0] + 1 if self._lines else 1
        self._lines.append((number, line))
        self._has_lines.set()

    async def _listen(self, source: AsyncSource) -> None:
        async for miss in source:
            key = Key(miss.endpoint, miss.cache_key, Group(miss.fingerprint, **self._group))
            self._misses[key] = miss
            self._tell(Missed(self._place.node, key))
        raise ClusterError("the broker has another source of records, or none", reason="replaced")

    # The directory.

    def _tell(self, event: ClusterEvent) -> None:
        self._events.append(event)
        self._has_events.set()

    async def _stay_joined(self) -> None:
        """Be joined to the directory; when it is lost, or asks for it, join again."""
        while True:
            try:
                directory = find_or_create(
                    DirectoryActor, actor_name(self._place.cluster, "directory"), self._place.ray_node, self._place.cluster
                )
                statement = await self._statement()
                agent = ray.get_runtime_context().current_actor
                self._knows_epoch.clear()
                try:
                    self._epoch = await directory.join.remote(statement, self._life, agent)
                finally:
                    self._knows_epoch.set()
                for event, _ in self._requests.values():
                    self._tell(event)
                self._directory = directory
                await self._compare()
                await self._publish()
                await self._pump(directory)
            except LOST as error:
                _log.info("the directory is lost: %s", error)
                self._epoch = ""
                await asyncio.sleep(_PAUSE * random.random())

    async def _statement(self) -> NodeJoined:
        """State all that this node holds; it replaces what was to be reported."""
        self._rejoin.clear()
        listed = await self._listed()
        self._events.clear()
        holdings = self._holdings.state(listed)
        candidates = tuple(
            Holding(key, version, handle.value.nbytes if handle.value is not None else 0, candidate=True)
            for (key, _), (version, handle) in self._candidates.items()
        )
        await self._take_up_builds()
        misses = tuple(key for key in self._misses if key not in self._building())
        return NodeJoined(self._place.node, self._facts, holdings + candidates, misses, tuple(self._orders.values()))

    def _building(self) -> set[Key]:
        return {order.key for order in self._orders.values() if isinstance(order, Build)}

    async def _take_up_builds(self) -> None:
        """Take up builds that an earlier agent began, and that go on in the broker."""
        for order in self._memo.builds:
            if order.id in self._orders:
                continue
            if isinstance(order, Build) and await self._is_running(order.key):
                self._orders[order.id] = order
                self._tasks[order.id] = asyncio.create_task(self._carried_out(order, self._await_build(order)))
            else:
                self._memo.end(order)

    async def _is_running(self, key: Key) -> bool:
        return any(
            run["cache_key"] == key.cache_key and run["status"] in ("pending", "running")
            for run in await self._client.list_runs()
        )

    async def _pump(self, directory: Any) -> None:
        """Bring events to the directory, in their order, until it is lost or this agent is to join again."""
        alive = asyncio.ensure_future(directory.hold.remote())
        try:
            while not self._rejoin.is_set():
                waits = [asyncio.ensure_future(self._has_events.wait()), asyncio.ensure_future(self._rejoin.wait())]
                done, _ = await asyncio.wait([alive, *waits], return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                if alive in done:
                    alive.result()
                    return
                batch, self._events = self._events, []
                self._has_events.clear()
                if batch and not await directory.report.remote(self._place.node, self._life, batch):
                    return
        finally:
            alive.cancel()

    async def _compare(self) -> None:
        """Count the nodes, and say once of each kind that cannot share records with this one, and why."""
        self._nodes, kinds = await self._directory.kinds.remote()
        for facts, name in kinds.items():
            differing = [fact for fact in self._group if getattr(facts, fact) != self._group[fact]]
            if differing and facts not in self._others:
                self._others.add(facts)
                what = ", ".join(f"{fact} {getattr(facts, fact)} there and {self._group[fact]} here" for fact in differing)
                self._say(f"{name} has {what}: each of both kinds of nodes builds for itself")

    # Orders.

    def _begin(self, decision: Decision) -> None:
        match decision:
            case Abandon():
                self._spawn(self._abandon(decision))
            case FailMisses():
                self._spawn(self._fail_misses(decision))
            case Answer():
                _, waiting = self._requests.pop(decision.request, (None, None))
                if waiting is not None and not waiting.done():
                    waiting.set_result(decision.results)
            case Rejoin():
                self._rejoin.set()
            case _:
                self._orders[decision.id] = decision
                self._tasks[decision.id] = asyncio.create_task(self._carried_out(decision, self._work_of(decision)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        number = -next(self._numbers)
        task = self._tasks[number] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _work_of(self, order: Order) -> Coroutine[Any, Any, ClusterEvent]:
        match order:
            case Build():
                return self._build(order)
            case BuildCandidate():
                return self._prepare(order)
            case Fetch():
                return self._fetch(order)
            case ChangeOver():
                return self._promote(order)
            case Invalidate():
                return self._invalidate(order)

    async def _carried_out(self, order: Order, work: Coroutine[Any, Any, ClusterEvent]) -> None:
        """Carry an order out, and answer it; one that was replaced by another is not answered."""
        try:
            event = await work
        except _Failed as failure:
            event = OrderFailed(order, str(failure), failure.blame, failure.payload)
        except asyncio.CancelledError:
            raise
        except SharedRPCError as error:
            event = OrderFailed(order, f"{type(error).__name__}: {error}", Blame.NODE)
        except Exception as error:
            _log.exception("order %s failed", order)
            event = OrderFailed(order, f"{type(error).__name__}: {error}", Blame.NODE)
        finally:
            self._orders.pop(order.id, None)
            self._tasks.pop(order.id, None)
        if isinstance(event, OrderFailed):
            self._say(f"{type(order).__name__.lower()} of {order.key.cache_key} failed here: {event.error}")
        self._tell(event)
        with contextlib.suppress(SharedRPCError):  # the broker has gone: that is noticed elsewhere
            await self._publish()

    async def _build(self, order: Build) -> Built:
        """Have the broker build the object of a miss."""
        miss = self._misses.pop(order.key, None)
        if miss is None or self._source is None:
            raise _Failed("no call waits for it there any more", Blame.NODE)
        self._memo.begin(order)
        try:
            async with await self._source.build(miss) as handle:
                return await self._built(order, handle.object_id)
        except (ConnectError, ConnectionClosed):
            raise
        except RemoteError as error:
            raise _Failed(str(error), Blame.ENDPOINT, _packed(error)) from error
        except SharedRPCError as error:
            raise _Failed(f"{type(error).__name__}: {error}", Blame.NODE, _packed(error)) from error
        finally:
            self._memo.end(order)

    async def _built(self, order: Build, object_id: str) -> Built:
        info = await self._client.get_object_info(object_id)
        self._holdings.hold(order.key, Version(order.number, object_id), object_id, info["nbytes"])
        return Built(order, object_id, info["nbytes"])

    async def _await_build(self, order: Build) -> Built:
        """Wait for the end of a build that an earlier agent began."""
        while await self._is_running(order.key):  # noqa: ASYNC110  # the broker has no news of runs
            await asyncio.sleep(0.2)
        self._memo.end(order)
        for found in await self._listed():
            if found.key == order.key:
                return await self._built(order, found.object_id)
        raise _Failed("the build ended without an object", Blame.NODE)

    async def _prepare(self, order: BuildCandidate) -> Built:
        """Have the broker build a candidate."""
        args, kwargs = msgspec.msgpack.decode(order.payload, type=tuple[bytes, bytes])
        self._memo.begin(order)
        try:
            handle = await self._client._run(self._candidate(order.key.endpoint, args, kwargs), timeout=None)
        except RemoteError as error:
            raise _Failed(str(error), Blame.ENDPOINT, _packed(error)) from error
        finally:
            self._memo.end(order)
        version = Version(order.number, handle.object_id)
        info = await self._client.get_object_info(handle.object_id)
        self._candidates[order.key, version.digest] = (version, handle)
        return Built(order, handle.object_id, info["nbytes"])

    async def _promote(self, order: ChangeOver) -> Done:
        """Make a candidate the current object."""
        _, handle = self._candidates.get((order.key, order.version.digest), (None, None))
        if handle is None:
            if self._holdings.object_of(order.key, order.version) is not None:
                return Done(order)
            raise _Failed("the candidate is not there any more", Blame.NODE)
        generation = await self._client.promote(handle)
        self._holdings.hold(order.key, order.version, generation.object_id, generation.nbytes)
        miss = self._misses.pop(order.key, None)
        if miss is not None:
            await self._answer_from(miss, generation.object_id)
        self._candidates.pop((order.key, order.version.digest), None)
        await handle.release()
        return Done(order)

    async def _answer_from(self, miss: Miss, object_id: str) -> None:
        """Answer a miss with a copy of an object that has become current meanwhile."""
        assert self._source is not None, "a miss has come from the source"
        with contextlib.suppress(ClusterError):  # nobody waits any more
            async with await self._client.export(object_id) as record:
                await self._source.adopt(miss, record)

    async def _invalidate(self, order: Invalidate) -> Done:
        """Drop a call's object, and give up what is being received of it."""
        for key, digest in [found for found in (*self._receipts, *self._candidates) if found[0] == order.key]:
            await self._abandon(Abandon(self._place.node, key, Version(0, digest)))
        for found in await self._listed():
            if found.key == order.key:
                await self._client.invalidate_object(found.object_id)
        self._holdings.forget(order.key)
        return Done(order)

    async def _abandon(self, notice: Abandon) -> None:
        """Give up a version that is being received, or is a candidate."""
        await self._stop_fetch(notice.key, notice.version)
        receipt = self._receipts.pop((notice.key, notice.version.digest), None)
        if receipt is not None:
            await receipt.end()
        _, handle = self._candidates.pop((notice.key, notice.version.digest), (None, None))
        if handle is not None:
            await handle.release()

    async def _fail_misses(self, notice: FailMisses) -> None:
        """Answer the misses of a key with an error."""
        miss = self._misses.pop(notice.key, None)
        if miss is None or self._source is None:
            return
        error = _unpacked(notice.payload) if notice.payload else ClusterError(notice.error, reason="failed")
        with contextlib.suppress(ClusterError):  # nobody waits any more
            await self._source.fail(miss, error)

    # Transfers.

    def _orders_of(self, what: tuple[Key, str]) -> list[Fetch]:
        """Return the transfers of a version, by its digest, that are being carried out."""
        transfers = [order for order in self._orders.values() if isinstance(order, Fetch)]
        return [order for order in transfers if (order.key, order.version.digest) == what]

    async def _stop_fetch(self, key: Key, version: Version) -> None:
        """End a transfer without an answer; what has arrived is kept."""
        for order in self._orders_of((key, version.digest)):
            task = self._tasks.get(order.id)
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                await asyncio.wait([task])
                self._orders.pop(order.id, None)
                self._tasks.pop(order.id, None)

    async def _fetch(self, order: Fetch) -> Done:
        """Receive a version, and make it an object."""
        what = (order.key, order.version.digest)
        await self._stop_fetch(order.key, order.version)
        try:
            await self._receive(order)
        except _Failed:  # the rest is to come from another source: who receives it from here waits
            raise
        except Exception:
            if (receipt := self._receipts.get(what)) is not None:
                await self._offers.give_up(receipt)
            raise
        receipt = self._receipts[what]
        try:
            if order.candidate:
                self._candidates[what] = (order.version, await self._client.adopt_candidate(receipt.room))
                receipt.become(self._candidates[what][1].object_id)
            else:
                receipt.become(await self._adopt(order, receipt))
        finally:
            if self._receipts.get(what) is receipt:
                del self._receipts[what]
            await receipt.end()
        return Done(order, dict(receipt.movers))

    async def _adopt(self, order: Fetch, receipt: Receipt) -> str:
        """Make what was received the current object, and the answer to the misses of its key; return the object's id."""
        miss = self._misses.get(order.key)
        if miss is not None and self._source is not None:
            try:
                async with await self._source.adopt(miss, receipt.room) as handle:
                    self._holdings.hold(order.key, order.version, handle.object_id, order.nbytes)
                    self._misses.pop(order.key, None)
                    return handle.object_id
            except ClusterError as error:
                if error.reason != "answered":
                    raise
                self._misses.pop(order.key, None)
        generation = await self._client.adopt(receipt.room)
        self._holdings.hold(order.key, order.version, generation.object_id, order.nbytes)
        return generation.object_id

    async def _receive(self, order: Fetch) -> None:
        """Bring the bytes into a room of the broker, as far as an earlier transfer has not.

        What one mover cannot do, the next one does.
        """
        movers, problem = self._movers.wanted, self._movers.lacking
        while True:
            try:
                source = find(actor_name(self._place.cluster, "agent", order.source))
            except ClusterError as error:
                raise _Failed(str(error), Blame.SOURCE) from error
            this = ray.get_runtime_context().current_actor
            offer: Offer = await self._answer(order, source.offer, this, order, movers, self._place.store_nbytes)
            if offer.mover != movers[0]:
                problem = f"{order.source} has no mover {movers[0]!r}"
            if problem:
                self._say(f"{order.key.cache_key} comes by mover {offer.mover!r}: {problem}")
            try:
                receipt = await self._receipt_of(order, offer)
                await self._take_parts(order, source, offer, receipt)
                return
            except MoverFailed as error:
                movers, problem = movers[movers.index(offer.mover) + 1 :], f"{offer.mover} failed, {_cause_of(error)}"
                if not movers:
                    raise _Failed(f"{problem}, from {order.source}", Blame.SOURCE) from error
            finally:
                with contextlib.suppress(*LOST):
                    source.end_offer.remote(offer.number)

    async def _receipt_of(self, order: Fetch, offer: Offer) -> Receipt:
        """Return the room for what is offered: that of an earlier transfer, or a new one."""
        what = (order.key, order.version.digest)
        receipt = self._receipts.get(what)
        header = RecordHeader.from_bytes(offer.header)
        if receipt is None or not receipt.is_of(header):
            if receipt is not None:
                await receipt.end()
            receipt = self._receipts[what] = Receipt(await self._client.allocate(header), offer.part_nbytes)
            self._has_more.set()
            self._has_more = asyncio.Event()
        return receipt

    async def _answer(self, order: Fetch, method: Any, *words: Any) -> Any:
        """Return what a source answers to a question, which is asked again for as long as the source waits for that itself."""
        try:
            while True:
                async with asyncio.timeout(_ANSWER):
                    answer = await method.remote(*words)
                    if isinstance(answer, Put):
                        return await answer.reference
                if answer is not None:
                    return answer
        except LOST as error:
            raise _Failed(f"{order.source} was lost: {_first_line(error)}", Blame.SOURCE) from error
        except MoverFailed:
            raise
        except SharedRPCError as error:
            raise _Failed(str(error), Blame.RELAY if order.relay else Blame.SOURCE) from error
        except RayTaskError as error:
            raise _Failed(f"{order.source} failed: {_last_line(error)}", Blame.SOURCE) from error
        except TimeoutError as error:
            raise _Failed(f"{order.source} has not answered in {_ANSWER:g} s", Blame.SOURCE) from error

    async def _take_parts(self, order: Fetch, source: Any, offer: Offer, receipt: Receipt) -> None:
        """Receive what is missing, a few parts at a time."""
        mover = self._movers.make(offer.mover)
        under_way: deque[tuple[Part, asyncio.Task[Any]]] = deque()
        receipt.cut(offer.part_nbytes)
        waiting = deque(receipt.missing)
        watch = asyncio.create_task(_loss_of(source, offer.number))
        watch.add_done_callback(_seen)

        def ask_ahead() -> None:
            while waiting and len(under_way) < _WINDOW:
                part = waiting.popleft()
                answer = self._answer(order, source.part, offer.number, part)
                under_way.append((part, asyncio.create_task(answer)))

        try:
            ask_ahead()
            while under_way:
                part, answer = under_way[0]
                given = await answer
                under_way.popleft()
                ask_ahead()
                await self._take(mover, given, receipt.room, part, watch)
                del given, answer
                receipt.arrived(part, offer.mover)
                self._received[offer.mover] += part.nbytes
        except LOST as error:  # noticed while a part was taken
            raise _Failed(f"{order.source} was lost: {_first_line(error)}", Blame.SOURCE) from error
        except DamagedPart as error:
            raise _Failed(f"the digests do not fit: {error}, from {order.source}", Blame.SOURCE) from error
        finally:
            watch.cancel()
            for _, answer in under_way:
                answer.cancel()
                answer.add_done_callback(_seen)
            await _end_of(asyncio.to_thread(mover.close))

    async def _take(self, mover: Mover, given: Any, room: AsyncExportedRecord, part: Part, watch: asyncio.Future[Any]) -> None:
        """Have a part written. It is no more when this ends, whatever the reason: the source is lost, or this is cancelled."""
        taking = asyncio.ensure_future(asyncio.to_thread(mover.take, given, room, part))
        try:
            await asyncio.wait([taking, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not taking.done():
                await _end_of(_closed(mover, taking))
        if taking.exception() is not None and watch.done():
            watch.result()  # what was lost is the reason
        taking.result()

    # What is regular.

    async def _look_regularly(self) -> None:
        """Look at what the broker holds, give signs of life, and end exports that nobody reads."""
        report_every, last, counted = Rules().report_every, time.monotonic(), time.monotonic()
        while True:
            await asyncio.sleep(_LOOK)
            known, busy = self._holdings.known(), self._busy()
            listed = await self._listed()
            for key, version in self._holdings.lost(listed, known, busy | self._busy()):
                self._tell(Dropped(self._place.node, key, version))
            await self._offers.end_idle()
            await self._end_idle_receipts()
            if self._orders and time.monotonic() - last > report_every / 2:
                last = time.monotonic()
                self._tell(Advanced(self._place.node, {number: self._arrived(order) for number, order in self._orders.items()}))
            if self._epoch and time.monotonic() - counted > _CENSUS:
                counted = time.monotonic()
                with contextlib.suppress(*LOST):
                    await self._compare()
            await self._publish()

    def _busy(self) -> set[Key]:
        return {order.key for order in self._orders.values()}

    async def _end_idle_receipts(self) -> None:
        """Give up what has arrived of versions of which nobody has ordered the rest, as their callers got errors."""
        for what, receipt in list(self._receipts.items()):
            if time.monotonic() - receipt.used > _IDLE_RECEIPT and not self._orders_of(what):
                del self._receipts[what]
                await receipt.end()

    def _arrived(self, order: Order) -> int:
        receipt = self._receipts.get((order.key, order.version.digest)) if isinstance(order, Fetch) else None
        return receipt.nbytes if receipt is not None else 0

    async def _publish(self) -> None:
        """Have the broker show what this agent is doing."""
        if self._source is None or not self._source.server_id:
            return
        status = ClusterStatus(
            cluster=self._place.cluster,
            node=self._place.node,
            state="joined" if self._epoch else "looking for the directory",
            nodes=self._nodes,
            objects=len(self._holdings),
            bytes_received=self._received.total(),
            bytes_by_mover=dict(self._received),
            bytes_sent=self._offers.sent,
            activity=[self._doing(order) for order in self._orders.values()],
        )
        await self._source.report(status)

    def _doing(self, order: Order) -> str:
        what = f"{type(order).__name__.lower()} {order.key.cache_key}"
        return (
            f"{what} from {order.source}, {self._arrived(order)} of {order.nbytes} bytes" if isinstance(order, Fetch) else what
        )

    async def _listed(self) -> list[Listed]:
        """Return the objects that are current in the broker, with their keys."""
        endpoints = await self._client.list_endpoints()
        return [
            Listed(self._key_in(endpoints, found["endpoint"], found["cache_key"]), found["object_id"], found["nbytes"])
            for found in await self._client.list_objects()
            if found["kind"] == "result" and found["cached"] and found["cache_key"] is not None and not found["stale"]
            if found["endpoint"] in endpoints and endpoints[found["endpoint"]]["managed"]
        ]

    def _key_in(self, endpoints: dict[str, EndpointInfo], endpoint: str, cache_key: str) -> Key:
        return Key(endpoint, cache_key, Group(endpoints[endpoint]["fingerprint"], **self._group))

    async def _key(self, endpoint: str, cache_key: str) -> Key:
        return self._key_in(await self._client.list_endpoints(), endpoint, cache_key)

    # Requests.

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

    async def _ask(self, request: str, event: ClusterEvent) -> tuple[KeyResult, ...]:
        waiting: asyncio.Future[tuple[KeyResult, ...]] = asyncio.get_running_loop().create_future()
        self._requests[request] = (event, waiting)
        try:
            self._tell(event)
            return await waiting
        finally:
            self._requests.pop(request, None)


async def _loss_of(source: Any, number: int) -> None:
    """Wait until the source of an offer is lost, and raise that."""
    await source.offered.remote(number)
    await asyncio.Event().wait()  # the offer has ended, and its receiver hears of that when it asks for a part


def _seen(task: asyncio.Task[Any]) -> None:
    """Look at what came of a task that nobody may be waiting for."""
    if not task.cancelled():
        task.exception()


async def _closed(mover: Mover, taking: asyncio.Future[None]) -> None:
    """Close a mover, and wait until it writes no more."""
    await asyncio.to_thread(mover.close)
    await asyncio.wait([taking])


async def _end_of(work: Awaitable[Any]) -> None:
    """Wait for the end of what a thread does, however often this is cancelled meanwhile; then be cancelled."""
    work, cancelled = asyncio.ensure_future(work), False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def _leaves(group: BaseExceptionGroup[Exception]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _last_line(error: BaseException) -> str:
    return str(error).rstrip().rpartition("\n")[2]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _cause_of(error: BaseException) -> str:
    """Return what an exception says; of one that was raised in another actor, that one."""
    return str(getattr(error, "cause", error))


def _packed(error: SharedRPCError) -> bytes:
    """Return an error as it travels to the callers at other nodes: nobody on the way unpickles an endpoint's exception."""
    return msgspec.msgpack.encode((*to_wire(error), getattr(error, "pickled", b"")))


def _unpacked(payload: bytes) -> SharedRPCError:
    code, message, detail, pickled = msgspec.msgpack.decode(payload, type=tuple[str, str, dict[str, str], bytes])
    error = from_wire(code, message, detail)
    if not isinstance(error, SharedRPCError):
        return ClusterError(message, reason="failed")
    if isinstance(error, RemoteError):
        error.pickled = pickled
    return error
