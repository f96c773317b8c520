"""Runs: a call is answered from the cache, joins a run of its key, or starts one; and what becomes of its result."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from shared_rpc.errors import ConnectionClosed, SharedRPCError
from shared_rpc.observability.events import HOOKS, BuildFinished, BuildStarted
from shared_rpc.protocol.records import Arguments, Record
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import Progress, TaskInfo
from shared_rpc.server.executor import Executor, Invocation
from shared_rpc.server.observing import Observed
from shared_rpc.server.outcomes import Failure, Produced
from shared_rpc.server.state.calls import CallTable, Flight
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.state.tasks import TASK_SESSION
from shared_rpc.server.statistics import Statistics

if TYPE_CHECKING:
    from shared_rpc.server.state.tasks import Task

__all__ = ["CallArguments", "Delivery", "Runs", "Waiter", "close_arguments", "tell"]

_log = logging.getLogger("shared_rpc.server")

#: The arguments as the executor takes them: lowered, or the live ``(args, kwargs)`` of a caller in this process.
CallArguments = Arguments | tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Delivery:
    """The outcome of a call for one waiter. The record is borrowed while the delivery is handled.

    ``stored`` is the object where the server keeps it; with ``managed`` the waiter's session holds a lease on it now.
    """

    record: Record | None
    live: Any
    stored: StoredObject | None
    managed: bool


@dataclass(eq=False, slots=True)
class Waiter:
    """Somebody who waits for an outcome: the session it belongs to, and where the outcome goes.

    :param local: whether it is a caller in this process, who can do with the live value.
    :param keeps: whether its session is to hold the result, managed or not: it is a task.
    :param refreshes: whether it wants a new result, and takes none: what there is in the cache is no answer to it, nor what
        another call's run will bring; ``arguments`` is then what tells its arguments from others', None where nothing does.
    :param looks: whether it only wants to know how a task ends, and takes no result; its outcome is its last event.
    :param claims: of one who looks: whether its session is to hold the result, so that it can be fetched then.
    :param on_begin: called when the work starts.
    :param on_progress: called with what the endpoint says of it.
    :param on_starved: called with why, if the result has to wait for memory.
    :param on_leave: called when it no longer waits, of one that the core does not know of.
    :param pooled: whether it takes a result that lies in its session's pool.
    :param on_event: of somebody who waits for a task: called with every change.
    :param request_id: tells its request from all others, for logs and errors.
    :param observed: its call, where somebody listens.
    """

    session: str
    deliver: Callable[[Delivery | Failure], object]
    local: bool = False
    keeps: bool = False
    refreshes: bool = False
    arguments: str | None = None
    looks: bool = False
    claims: bool = False
    on_begin: Callable[[], None] | None = None
    on_progress: Callable[[Progress], None] | None = None
    on_starved: Callable[[str], None] | None = None
    on_leave: Callable[[], None] | None = None
    pooled: bool = False
    on_event: Callable[[TaskInfo], None] | None = None
    request_id: str = ""
    observed: Observed | None = field(default=None, repr=False)
    flight: Flight[Waiter] | None = field(default=None, repr=False)
    task: Task[Waiter] | None = field(default=None, repr=False)


class Runs:
    """All runs of a server. On its loop only.

    :param settle: called with the ids of objects whose leases changed, or which were added.
    :param admit: called with a record that is to be kept; what it raises is told instead.
    :param listed: called with an object that the cache lists from now on.
    :param server_id: the server's, for those who listen.
    """

    def __init__(
        self,
        executor: Executor,
        objects: ObjectStore,
        leases: LeaseTable,
        settle: Callable[[str], None],
        admit: Callable[[Record], None],
        listed: Callable[[StoredObject], None],
        server_id: str,
    ) -> None:
        self.calls: CallTable[Waiter] = CallTable()
        self.statistics = Statistics()
        self._executor = executor
        self._objects = objects
        self._leases = leases
        self._settle = settle
        self._admit = admit
        self._listed = listed
        self._server_id = server_id
        self._invocations: dict[Flight[Waiter], Invocation] = {}
        #: Of each serialized endpoint the run that has its turn, and those that wait for theirs.
        self._lines: defaultdict[str, deque[Flight[Waiter]]] = defaultdict(deque)

    def stop(self) -> None:
        """Release every waiter."""
        gone = Failure.of(ConnectionClosed(f"the server (pid {os.getpid()}) was stopped before the call ended"))
        for flight in self.calls:
            if not flight.running:
                invocation = self._invocations.pop(flight)
                self._executor.withdraw(invocation)
                close_arguments(invocation.arguments)
            self._close(flight, gone)
        self._lines.clear()

    def enter(
        self, waiter: Waiter, spec: EndpointSpec, key: str | None, arguments: CallArguments, chain: frozenset[str]
    ) -> None:
        """Answer from the cache, join a run, or start one. The waiter is told exactly once, perhaps before this returns.

        :param arguments: descriptors in them belong to this object now.
        """
        if not waiter.refreshes and self.answer_from_cache(waiter, spec, key):
            close_arguments(arguments)
            return
        waiter.flight = self._join(waiter, key) if spec.singleflight else None
        if waiter.flight is not None:
            close_arguments(arguments)
            self.statistics.of(spec.name).joined += 1
            if waiter.observed is not None:
                waiter.observed.how = "joined"
            self._catch_up(waiter, waiter.flight)
            return
        if key is not None and not waiter.refreshes:
            self.statistics.of(spec.name).misses += 1
        flight = waiter.flight = self.calls.open(spec.name, key, waiter, waiter.arguments)
        publish = not waiter.local or key is not None or spec.managed or waiter.keeps
        flight.created_at = time.time()
        self._invocations[flight] = Invocation(
            spec,
            arguments,
            publish,
            chain | {spec.name, key or spec.name},
            background=waiter.keeps or waiter.refreshes,
            session=waiter.session,
            pooled=waiter.pooled and key is None and not spec.managed and not waiter.keeps,
            on_starved=lambda why: self._starved(flight, why),
            on_begin=lambda: self._begin(flight),
            on_progress=lambda progress: self._progress(flight, progress),
            request_id=waiter.request_id,
            cached=key is not None,
        )
        if spec.concurrency == "serialized":
            line = self._lines[spec.name]
            line.append(flight)
            if line[0] is not flight:
                return
        self._start(flight)

    def _join(self, waiter: Waiter, key: str | None) -> Flight[Waiter] | None:
        return self.calls.join_refresh(waiter.arguments, waiter) if waiter.refreshes else self.calls.join(key, waiter)

    def answer_from_cache(self, waiter: Waiter, spec: EndpointSpec, key: str | None) -> bool:
        """Deliver the cached result of a key, if there is one."""
        stored = self._objects.lookup(key) if key is not None else None
        if stored is None:
            return False
        self.statistics.of(spec.name).hits += 1
        if waiter.observed is not None:
            waiter.observed.how = "hit"
        self._deliver([waiter], spec, stored.record, stored.live, stored)
        return True

    def leave(self, waiter: Waiter) -> None:
        """The waiter no longer waits; it is not told anything any more. Work that has not begun is dropped with its last."""
        flight, waiter.flight = waiter.flight, None
        if flight is None:
            return
        if self.calls.leave(flight, waiter):
            self._drop(flight)
        elif not flight.waiters and flight in self._invocations:
            self._abandon(flight)

    def _abandon(self, flight: Flight[Waiter]) -> None:
        """Nobody waits for a run. If its result waits for memory, it is dropped."""
        if self._executor.abandon(self._invocations[flight]):
            self.calls.close(flight)
            invocation = self._invocations.pop(flight)
            self._count_build(flight, invocation)
            self._next_turn(flight, invocation.spec)

    def facts(self, limit: int) -> list[dict[str, Any]]:
        """``list_runs``'s list: the oldest of those that have not ended."""
        oldest = sorted(self.calls, key=lambda flight: flight.created_at)[:limit]
        return [_facts(flight, time.time() - time.monotonic()) for flight in oldest]

    def ask_to_stop(self, flight: Flight[Waiter]) -> None:
        """Ask a run that has begun to stop. It is of no use to others from here on: later calls of its key do not join it."""
        self.calls.part(flight)
        self._executor.cancel(self._invocations[flight])

    def _catch_up(self, waiter: Waiter, flight: Flight[Waiter]) -> None:
        if flight.running and waiter.on_begin is not None:
            waiter.on_begin()
        if flight.progress is not None and waiter.on_progress is not None:
            waiter.on_progress(flight.progress)

    def _start(self, flight: Flight[Waiter]) -> None:
        self._executor.start(self._invocations[flight], lambda outcome: self._ended(flight, outcome))

    def _begin(self, flight: Flight[Waiter]) -> None:
        self.statistics.of(flight.endpoint).builds += 1
        self.calls.begin(flight, time.monotonic())
        if HOOKS.registered:
            invocation = self._invocations[flight]
            HOOKS.emit(
                BuildStarted(
                    server_id=self._server_id,
                    endpoint=flight.endpoint,
                    request_id=invocation.request_id,
                    cached=flight.key is not None,
                )
            )
        for waiter in tuple(flight.waiters):
            if waiter.on_begin is not None:
                waiter.on_begin()

    def _progress(self, flight: Flight[Waiter], progress: Progress) -> None:
        flight.progress = progress
        for waiter in tuple(flight.waiters):
            if waiter.on_progress is not None:
                waiter.on_progress(progress)

    def _starved(self, flight: Flight[Waiter], why: str) -> None:
        # The endpoint itself has ended: others need not wait for the memory that this one's caller holds.
        self._next_turn(flight, self._invocations[flight].spec)
        for waiter in tuple(flight.waiters):
            if waiter.on_starved is not None:
                waiter.on_starved(why)
        if not flight.waiters:  # they left while the endpoint worked
            self._abandon(flight)

    def _ended(self, flight: Flight[Waiter], outcome: Produced | Failure) -> None:
        invocation = self._invocations.pop(flight)
        if flight.running:
            self._count_build(flight, invocation, outcome.code if isinstance(outcome, Failure) else "")
        if isinstance(outcome, Produced) and outcome.record is not None and not flight.waiters:
            self._executor.take_back(invocation, outcome.record)
        if flight in self.calls:
            self._finish(flight, invocation.spec, outcome)
        elif isinstance(outcome, Produced) and outcome.record is not None:
            outcome.record.close()  # the server was stopped
        self._next_turn(flight, invocation.spec)

    def _count_build(self, flight: Flight[Waiter], invocation: Invocation, error: str = "") -> None:
        seconds = time.monotonic() - flight.begun_at
        self.statistics.of(flight.endpoint).build_seconds += seconds
        if HOOKS.registered:
            HOOKS.emit(
                BuildFinished(
                    server_id=self._server_id,
                    endpoint=flight.endpoint,
                    request_id=invocation.request_id,
                    cached=flight.key is not None,
                    seconds=seconds,
                    error=error,
                )
            )

    def _drop(self, flight: Flight[Waiter]) -> None:
        """Nobody waits, and it has not begun."""
        self.calls.close(flight)
        invocation = self._invocations.pop(flight)
        self._executor.withdraw(invocation)
        close_arguments(invocation.arguments)
        self._next_turn(flight, invocation.spec)

    def _next_turn(self, flight: Flight[Waiter], spec: EndpointSpec) -> None:
        """A run of a serialized endpoint ended, or will not be."""
        if spec.concurrency == "parallel":
            return
        line = self._lines.get(spec.name, deque())
        if flight not in line:  # the server was stopped
            return
        had_turn = line[0] is flight
        line.remove(flight)
        if not line:
            del self._lines[spec.name]
        elif had_turn:
            self._start(line[0])

    def _finish(self, flight: Flight[Waiter], spec: EndpointSpec, outcome: Produced | Failure) -> None:
        if isinstance(outcome, Failure):
            self._close(flight, outcome)
            return
        key, record = flight.key, outcome.record
        waiters = self.calls.close(flight)
        kept = key is not None or (spec.managed and waiters) or any(waiter.keeps for waiter in waiters)
        if record is None or not kept:
            self._deliver(waiters, spec, record, outcome.live, None)
            if record is not None:
                record.close()
            return
        refusal = self._refusal(record)
        if refusal is not None:
            record.close()
            self._executor.reclaim()
            self._tell_all(spec.name, waiters, refusal)
            return
        stored = self._objects.add(
            spec.name,
            key or flight.former_key,
            record,
            spec.idle_ttl,
            outcome.live,
            run=flight.number,
            listed=key is not None,
            managed=spec.managed,
        )
        self._deliver(waiters, spec, record, outcome.live, stored)
        if stored.listed:
            self._listed(stored)
        self._settle(stored.object_id)

    def _refusal(self, record: Record) -> Failure | None:
        """Why a result cannot be kept, where that is so."""
        try:
            self._admit(record)
        except SharedRPCError as error:
            return Failure.of(error)
        return None

    def _close(self, flight: Flight[Waiter], failure: Failure) -> None:
        self._tell_all(flight.endpoint, self.calls.close(flight), failure)

    def _tell_all(self, endpoint: str, waiters: Sequence[Waiter], failure: Failure) -> None:
        self.statistics.of(endpoint).errors += len(waiters)
        for waiter in waiters:
            tell(waiter, failure)

    def _deliver(
        self, waiters: Sequence[Waiter], spec: EndpointSpec, record: Record | None, live: Any, stored: StoredObject | None
    ) -> None:
        managed = spec.managed and stored is not None
        if stored is not None:
            # All of them before anybody is told: one who gives its lease back at once must not end the others'.
            for waiter in waiters:
                if (managed and not waiter.refreshes) or waiter.keeps:
                    self._leases.grant(waiter.session, stored.object_id)
        # Tasks last: what a task hands on and lets go of may be all that keeps the record.
        for waiter in sorted(waiters, key=lambda waiter: waiter.keeps):
            tell(waiter, Delivery(record, live, stored, managed and not waiter.refreshes))


def tell(waiter: Waiter, outcome: Delivery | Failure) -> None:
    """Deliver. What goes wrong with one waiter must not reach the next, and not end the server."""
    waiter.flight = None
    if waiter.observed is not None:
        waiter.observed.told(outcome)
    try:
        waiter.deliver(outcome)
    except Exception:
        _log.exception("a waiter of session %s could not be told", waiter.session)


def _facts(flight: Flight[Waiter], epoch: float) -> dict[str, Any]:
    """:param epoch: the Unix time at which the monotonic clock was at zero."""
    progress = flight.progress
    tasks = [waiter.session.removeprefix(TASK_SESSION) for waiter in flight.waiters if waiter.keeps]
    return {
        "endpoint": flight.endpoint,
        "cache_key": flight.key or flight.former_key,
        "status": "running" if flight.running else "pending",
        "created_at": flight.created_at,
        "started_at": epoch + flight.begun_at if flight.running else None,
        "calls": len(flight.waiters) - len(tasks),
        "tasks": tasks,
        "progress": msgspec.structs.asdict(progress) if progress is not None else None,
    }


def close_arguments(arguments: CallArguments) -> None:
    """Close the descriptors of arguments that nobody will use."""
    if isinstance(arguments, Arguments):
        arguments.close()
