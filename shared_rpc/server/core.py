"""The server without its sockets: endpoints, calls, objects and leases, driven on one event loop.

Every caller, near or far, comes through :meth:`Core.call`. The core knows records and an executor; it imports no
torch and looks into no skeleton.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

from shared_rpc.endpoints import Registry, bind, cache_key, check_chain
from shared_rpc.errors import ConnectionClosed, StaleHandleError
from shared_rpc.records import Arguments, Record
from shared_rpc.server.executor import Executor, Failure, Invocation, Produced
from shared_rpc.store.calls import CallTable, Flight
from shared_rpc.store.leases import LeaseTable
from shared_rpc.store.objects import ObjectStore, StoredObject
from shared_rpc.wire.specs import EndpointSpec

__all__ = ["Core", "Delivery", "Waiter"]

_log = logging.getLogger("shared_rpc.server")


@dataclass(frozen=True)
class Delivery:
    """The outcome of a call for one waiter. The record is borrowed while the delivery is handled.

    ``stored`` is the object where the server keeps it; with ``managed`` the waiter's session holds a lease on it now.
    """

    record: Record | None
    live: Any
    stored: StoredObject | None
    managed: bool


@dataclass(eq=False)
class Waiter:
    """Somebody who waits for a call: the session it belongs to, and where the outcome goes.

    ``local``: a caller in this process, who can do with the live value.
    """

    session: str
    deliver: Callable[[Delivery | Failure], None]
    local: bool = False
    flight: Flight[Waiter] | None = field(default=None, repr=False)


class Core:
    """All that a server does, apart from talking.

    :param registry: the endpoints; it may grow while the server runs.
    :param device: the id of the device that results live on.
    :param max_bytes: see :class:`ObjectStore`.
    """

    def __init__(
        self,
        registry: Registry,
        executor: Executor,
        device: str,
        *,
        max_bytes: int | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.server_id = secrets.token_hex(8)
        self.device = device
        self.registry = registry
        self.leases = LeaseTable()
        self.objects = ObjectStore(self.leases, now, self._dropped, max_bytes)
        self.calls: CallTable[Waiter] = CallTable()
        self.counters = {"calls": 0, "cache_hits": 0, "joined": 0, "builds": 0, "failures": 0}
        self.started_at = now()
        self._executor = executor
        self._serialized: dict[str, anyio.Lock] = {}
        self._scopes: dict[Flight[Waiter], anyio.CancelScope] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._stopped = False
        self._wake_sweeper = anyio.Event()

    async def run(self, *, started: anyio.Event) -> None:
        """Carry out calls until cancelled. Then every waiter is told, and every object dropped."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._sweep)
                started.set()
                await anyio.sleep_forever()
        finally:
            self.stop()

    def stop(self) -> None:
        """Release every waiter and drop every object. Calls that come later are refused."""
        self._stopped = True
        gone = Failure.of(ConnectionClosed(f"the server (pid {os.getpid()}) was stopped before the call ended"))
        for flight in self.calls:
            self._close(flight, gone)
        self.objects.clear()

    def call(
        self,
        waiter: Waiter,
        endpoint: str,
        lowered: tuple[Sequence[Any], dict[str, Any]],
        arguments: Arguments | tuple[tuple[Any, ...], dict[str, Any]],
        chain: frozenset[str] = frozenset(),
    ) -> None:
        """Answer from the cache, join a run, or start one. The waiter is told exactly once, perhaps before this returns.

        :param lowered: the arguments as plain data, for binding and for the key.
        :param arguments: the arguments as the executor takes them; descriptors in them belong to the core now.
        :param chain: for a call made by an endpoint, what :data:`~shared_rpc.server.executor.CHAIN` held there.
        """
        self.counters["calls"] += 1
        try:
            if self._stopped:
                raise ConnectionClosed(f"the server (pid {os.getpid()}) was stopped")
            spec = self.registry.get(endpoint)
            key = cache_key(spec, bind(spec, *lowered))
            check_chain(spec, key, chain)
        except BaseException as error:
            _close_arguments(arguments)
            self.counters["failures"] += 1
            waiter.deliver(Failure.of(error))
            return
        stored = self.objects.lookup(key) if key is not None else None
        if stored is not None:
            _close_arguments(arguments)
            self.counters["cache_hits"] += 1
            self._deliver([waiter], spec, stored.record, stored.live, stored)
            return
        waiter.flight = self.calls.join(key, waiter) if spec.singleflight else None
        if waiter.flight is not None:
            _close_arguments(arguments)
            self.counters["joined"] += 1
            return
        assert self._tasks is not None, "the core is not running"
        flight = waiter.flight = self.calls.open(endpoint, key, waiter)
        publish = not waiter.local or key is not None or spec.managed
        self._tasks.start_soon(
            self._run, flight, spec, Invocation(endpoint, arguments, publish, chain | {endpoint, key or endpoint})
        )

    def leave(self, waiter: Waiter) -> None:
        """The waiter no longer waits; it is not told anything any more."""
        flight, waiter.flight = waiter.flight, None
        if flight is not None and self.calls.leave(flight, waiter):
            scope = self._scopes.get(flight)
            self.calls.close(flight)
            if scope is not None:
                scope.cancel()

    def end_session(self, session: str) -> None:
        """Give back all that the session held."""
        self._settle(*self.leases.end_session(session))

    def release(self, session: str, object_ids: Iterable[str]) -> int:
        """Give back one lease of the session for each id; how many it really held."""
        released = [object_id for object_id in object_ids if self.leases.release(session, object_id)]
        self._settle(*released)
        return len(released)

    def invalidate_call(self, endpoint: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Drop the cached result of one call, and keep a run of it that goes on out of the cache."""
        spec = self.registry.get(endpoint)
        key = cache_key(spec, bind(spec, args, kwargs))
        if key is None:
            return 0
        self.calls.detach(key=key)
        return self.objects.invalidate(key=key)

    def invalidate_endpoint(self, endpoint: str) -> int:
        """Drop all cached results of an endpoint, and keep its runs that go on out of the cache."""
        self.registry.get(endpoint)
        self.calls.detach(endpoint=endpoint)
        return self.objects.invalidate(endpoint=endpoint)

    def object_info(self, object_id: str) -> dict[str, Any]:
        """The facts about an object.

        :raises StaleHandleError: if the server does not own it (any more).
        """
        stored = self.objects.get(object_id)
        if stored is None:
            raise StaleHandleError(f"the server {self.server_id} owns no object {object_id}", reason="object_gone")
        return self.facts(stored)

    def facts(self, stored: StoredObject) -> dict[str, Any]:
        """``get_object_info``'s dict."""
        return stored.facts(self.server_id, len(self.leases.holders(stored.object_id)))

    def info(self) -> dict[str, Any]:
        """What there is to know of the server, apart from its sockets."""
        return {
            "server_id": self.server_id,
            "pid": os.getpid(),
            "device": self.device,
            "started_at": self.started_at,
            "endpoints": [spec.name for spec in self.registry.all()],
            "objects": len(self.objects),
            "nbytes": self.objects.nbytes,
            "leases": len(self.leases),
            "running": len(self.calls),
            **self.counters,
        }

    async def _run(self, flight: Flight[Waiter], spec: EndpointSpec, invocation: Invocation) -> None:
        outcome: Produced | Failure = Failure.of(ConnectionClosed("the server was stopped before the call ended"))
        with anyio.CancelScope() as scope:
            if flight not in self.calls:  # everybody left before this task had its first turn
                scope.cancel()
            self._scopes[flight] = scope
            try:
                outcome = await self._execute(flight, spec, invocation)
            except Exception as error:
                _log.exception("endpoint %s could not be run", spec.name)
                outcome = Failure.raised(error)
            finally:
                del self._scopes[flight]
                if not flight.running:
                    _close_arguments(invocation.arguments)
                self._finish(flight, spec, outcome)

    async def _execute(self, flight: Flight[Waiter], spec: EndpointSpec, invocation: Invocation) -> Produced | Failure:
        if spec.concurrency == "parallel":
            return await self._executor.run(invocation, lambda: self._begin(flight))
        async with self._serialized.setdefault(spec.name, anyio.Lock()):
            return await self._executor.run(invocation, lambda: self._begin(flight))

    def _begin(self, flight: Flight[Waiter]) -> None:
        self.counters["builds"] += 1
        self.calls.begin(flight)

    def _finish(self, flight: Flight[Waiter], spec: EndpointSpec, outcome: Produced | Failure) -> None:
        if isinstance(outcome, Failure):
            self._close(flight, outcome)
            return
        key = flight.key
        waiters = self.calls.close(flight)
        record = outcome.record
        if record is None or (key is None and not (spec.managed and waiters)):
            self._deliver(waiters, spec, record, outcome.live, None)
            if record is not None:
                record.close()
            return
        stored = self.objects.add(spec.name, key, record, spec.idle_ttl, outcome.live)
        self._deliver(waiters, spec, record, outcome.live, stored)
        self._settle(stored.object_id)

    def _close(self, flight: Flight[Waiter], failure: Failure) -> None:
        for waiter in self.calls.close(flight):
            self.counters["failures"] += 1
            _tell(waiter, failure)

    def _deliver(
        self, waiters: Sequence[Waiter], spec: EndpointSpec, record: Record | None, live: Any, stored: StoredObject | None
    ) -> None:
        managed = spec.managed and stored is not None
        if managed and stored is not None:
            # All of them before anybody is told: one who gives its lease back at once must not end the others'.
            for waiter in waiters:
                self.leases.grant(waiter.session, stored.object_id)
        for waiter in waiters:
            _tell(waiter, Delivery(record, live, stored, managed))

    def _settle(self, *object_ids: str) -> None:
        self.objects.settle(*object_ids)
        self._wake_sweeper.set()

    def _dropped(self, stored: StoredObject) -> None:
        stored.record.close()
        stored.live = None
        self._executor.reclaim()
        _log.info("dropped object %s of %s, %d bytes", stored.object_id, stored.endpoint, stored.record.nbytes)

    async def _sweep(self) -> None:
        while True:
            self._wake_sweeper = anyio.Event()
            pause = self.objects.expire()
            with anyio.move_on_after(pause if pause is not None else float("inf")):
                await self._wake_sweeper.wait()


def _tell(waiter: Waiter, outcome: Delivery | Failure) -> None:
    """What goes wrong with one waiter must not reach the next, and not end the server."""
    waiter.flight = None
    try:
        waiter.deliver(outcome)
    except Exception:
        _log.exception("a waiter of session %s could not be told", waiter.session)


def _close_arguments(arguments: Arguments | tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    if isinstance(arguments, Arguments):
        arguments.close()
