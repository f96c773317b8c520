"""Runs: a call is answered from the cache, joins a run of its key, or starts one; and its result is published."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec

from shared_rpc.errors import ConnectionClosed
from shared_rpc.execution.executor import Executor
from shared_rpc.execution.freeing import frees_are_pending, until_freed
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.run import CallArguments, Run
from shared_rpc.memory.records import Arguments, Record
from shared_rpc.observability.events import HOOKS, BuildFinished, BuildStarted
from shared_rpc.observability.statistics import Statistics
from shared_rpc.protocol.infos import ProgressInfo, RunInfo
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import Progress, TaskInfo
from shared_rpc.server.capacity import Capacity, Reservation
from shared_rpc.server.observing import Observed
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.state.runs import RunTable
from shared_rpc.server.state.tasks import TASK_SESSION, Task

__all__ = ["CallArguments", "Delivery", "Restorer", "Runs", "Waiter", "close_arguments", "tell"]

_log = logging.getLogger("shared_rpc.server")

#: The keys built last, whose sizes are known.
_KNOWN_SIZES = 1 << 14


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
    """A waiter for an outcome: its session, and where the outcome goes.

    :param local: whether it is a caller in this process, which can use the live value.
    :param keeps: whether its session is to hold the result, managed or not: it is a task.
    :param refreshes: whether it wants a new result, and takes none: what there is in the cache is no answer to it, nor what
        another call's run will bring; ``arguments`` then identifies its arguments, None if nothing does.
    :param prepares: whether it wants a new result as a candidate, and its session is to hold that.
    :param looks: whether it only wants to know how a task ends, and takes no result; its outcome is its last event.
    :param claims: of a waiter that looks: whether its session holds the result, so that it can be fetched then.
    :param on_begin: called when the work starts.
    :param on_progress: called with the endpoint's progress.
    :param on_out_of_memory: called with why, if the result has to wait for memory.
    :param inner: whether it is the call of an endpoint that runs: it goes before others that wait for capacity: what
        they wait for may be what that endpoint uses.
    :param pooled: whether it takes a result that lies in its session's pool.
    :param on_event: of a waiter for a task: called with every change.
    :param request_id: identifies its request in logs and errors.
    :param observed: its call, if there is a hook.
    """

    session: str
    deliver: Callable[[Delivery | Failure], object]
    local: bool = False
    keeps: bool = False
    refreshes: bool = False
    arguments: str | None = None
    prepares: bool = False
    looks: bool = False
    claims: bool = False
    on_begin: Callable[[], None] | None = None
    on_progress: Callable[[Progress], None] | None = None
    on_out_of_memory: Callable[[str], None] | None = None
    inner: bool = False
    pooled: bool = False
    on_event: Callable[[TaskInfo], None] | None = None
    request_id: str = ""
    observed: Observed | None = field(default=None, repr=False)
    run: Run[Waiter] | None = field(default=None, repr=False)
    task: Task[Waiter] | None = field(default=None, repr=False)


class Restorer(Protocol):
    """The restoration of cold objects."""

    def when_warm(
        self,
        waiter: Waiter,
        stored: StoredObject,
        then: Callable[[], None],
        otherwise: Callable[[Failure | None], None] | None = None,
        *,
        rebuilds: bool = False,
    ) -> None:
        """Call ``then`` when a cold object is on its device. The waiter gets errors, also of ``then``, unless it leaves before.

        :param otherwise: called in place of ``then``, if that is not: with the failure, or None if the waiter has left.
        :param rebuilds: whether ``then`` is called too where the object cannot be restored any more, and was dropped.
        """

    def must_wait(self, waiter: Waiter, stored: StoredObject) -> bool:
        """Return whether a waiter that is to use an object has to ask for it by :meth:`when_warm`, though it is on its device.

        That is so while others wait for capacity there, so that the objects in use come to rest.
        """

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that no longer waits."""


class Runs:
    """All runs of a server. On its loop only.

    :param settle: called with the ids of objects whose leases changed, or which were added.
    :param capacity: is reserved before a result is kept, and before it is built again; its error becomes the outcome.
    :param listed: called with an object that the cache lists from now on.
    :param ask: called with a run whose object a source of records may have; True if it waits for that, see :meth:`begin`.
    :param unasked: called with a run that waits for a source, and is dropped.
    :param restorer: restores results that are cold.
    :param server_id: the server's, for events.
    """

    def __init__(
        self,
        executor: Executor,
        objects: ObjectStore,
        leases: LeaseTable,
        settle: Callable[[str], None],
        capacity: Capacity,
        listed: Callable[[StoredObject], None],
        ask: Callable[[Run[Waiter]], bool],
        unasked: Callable[[Run[Waiter]], None],
        restorer: Restorer,
        server_id: str,
    ) -> None:
        self.calls: RunTable[Waiter] = RunTable()
        self.statistics = Statistics()
        self._executor = executor
        self._objects = objects
        self._leases = leases
        self._settle = settle
        self._capacity = capacity
        #: Results that wait for capacity to be kept, by their runs.
        self._awaiting: dict[Run[Waiter], Completed] = {}
        #: What the latest results of keys took, in bytes by device: a result that is built anew takes as much.
        self._sizes: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._listed = listed
        self._ask = ask
        self._unasked = unasked
        self._restorer = restorer
        self._server_id = server_id
        #: Runs that wait until memory is freed.
        self._tasks: set[asyncio.Task[None]] = set()
        #: For each serialized endpoint, the run whose turn it is, and the runs in line after it.
        self._lines: defaultdict[str, deque[Run[Waiter]]] = defaultdict(deque)

    def stop(self) -> None:
        """Release every waiter."""
        for outcome in self._awaiting.values():
            self._discard(outcome.record)
        self._awaiting.clear()
        gone = Failure.of(ConnectionClosed(f"the server (pid {os.getpid()}) was stopped before the call ended"))
        for run in self.calls:
            if not run.over and not run.running:
                self._withdraw(run)
            self._close(run, gone)
        self._lines.clear()

    def enter(
        self, waiter: Waiter, spec: EndpointSpec, key: str | None, arguments: CallArguments, chain: frozenset[str]
    ) -> None:
        """Answer from the cache, join a run, or start one. The waiter is notified exactly once, perhaps before this returns.

        :param arguments: descriptors in them belong to this object now.
        """
        fresh = waiter.refreshes or waiter.prepares
        if key is not None and not fresh and self.answer_from_cache(waiter, spec, key, arguments, chain):
            return
        if spec.singleflight and (key is not None or waiter.refreshes) and not waiter.prepares:
            run = self.calls.join_refresh(waiter.arguments, waiter) if waiter.refreshes else self.calls.join(key, waiter)
            if run is not None:
                close_arguments(arguments)
                self._joined(waiter, run)
                return
        if key is not None and not fresh:
            self.statistics.of(spec.name)["misses"] += 1
        former_key = key if waiter.prepares else None
        key = None if waiter.prepares else key
        run = waiter.run = Run(
            spec,
            key,
            arguments,
            {waiter: None},
            waiter.arguments,
            publish=not waiter.local or key is not None or spec.managed or waiter.keeps or waiter.prepares,
            chain=chain | {spec.name, key or former_key or spec.name},
            background=waiter.keeps or fresh,
            session=waiter.session,
            pooled=waiter.pooled and key is None and not spec.managed and not waiter.keeps,
            request_id=waiter.request_id,
            cached=key is not None,
            former_key=former_key,
            prepares=waiter.prepares,
            created_at=time.time(),
        )
        self.calls.open(run)
        if spec.managed and key is not None and not waiter.refreshes and self._ask(run):
            return
        self.begin(run)

    def begin(self, run: Run[Waiter]) -> None:
        """Build what the source of records was asked for. The place of a serialized endpoint's run in line is from here on."""
        if run.spec.concurrency == "parallel" or self._has_turn(run):
            self._start(run)

    def _start(self, run: Run[Waiter]) -> None:
        """Have a run's work done, once there is capacity for what its key's latest result took."""
        sizes = self._sizes.get(run.key or run.former_key or "")
        if sizes is None or not self._capacity.evicts:
            self._execute(run)
            return

        def granted(reservation: Reservation) -> None:
            run.reservation = reservation
            self._execute(run)

        inner = any(waiter.inner for waiter in run.waiters)
        self._capacity.ask(run, sizes, granted, functools.partial(self._not_begun, run), first=inner)

    def _execute(self, run: Run[Waiter]) -> None:
        """Have the executor do a run's work, when there is memory for a result that gets its own."""
        if not run.pooled and frees_are_pending():
            task = asyncio.get_running_loop().create_task(self._execute_when_freed(run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._execute_now(run)

    async def _execute_when_freed(self, run: Run[Waiter]) -> None:
        await until_freed()
        if not run.over:
            self._execute_now(run)

    def _execute_now(self, run: Run[Waiter]) -> None:
        """Have the executor do a run's work. Where it cannot, the run has ended: perhaps no request waits for its start."""
        try:
            self._executor.start(run, self)
        except Exception as error:
            self._not_begun(run, Failure.unexpected(error, f"a run of {run.spec.name}() cannot be started"))

    def _not_begun(self, run: Run[Waiter], failure: Failure) -> None:
        """End a run whose work does not begin."""
        close_arguments(run.arguments)
        self.ended(run, failure)

    def _has_turn(self, run: Run[Waiter]) -> bool:
        """Get a run of a serialized endpoint in line; return whether it is the first."""
        line = self._lines[run.spec.name]
        line.append(run)
        return line[0] is run

    def adopt(self, run: Run[Waiter], record: Record) -> None:
        """End a run that waited for a source of records with a record of its; its descriptors belong to this object now."""
        self.statistics.of(run.spec.name)["adopted"] += 1
        for waiter in run.waiters:
            if waiter.observed is not None and waiter.observed.how == "built":
                waiter.observed.how = "adopted"
        close_arguments(run.arguments)
        run.adopted = True
        self.ended(run, Completed(record, None))

    def fail(self, run: Run[Waiter], failure: Failure) -> None:
        """End a run that waited for a source of records with an error."""
        close_arguments(run.arguments)
        self.ended(run, failure)

    def drop(self, run: Run[Waiter]) -> None:
        """Drop a run that has not begun."""
        self.calls.close(run)
        self._withdraw(run)
        self._next_turn(run)

    def _joined(self, waiter: Waiter, run: Run[Waiter]) -> None:
        waiter.run = run
        self.statistics.of(run.spec.name)["joined"] += 1
        if waiter.observed is not None:
            waiter.observed.how = "joined"
        if run.running and waiter.on_begin is not None:
            waiter.on_begin()
        if run.progress is not None and waiter.on_progress is not None:
            waiter.on_progress(run.progress)

    def answer_from_cache(
        self,
        waiter: Waiter,
        spec: EndpointSpec,
        key: str | None,
        arguments: CallArguments,
        chain: frozenset[str],
        again: Callable[[], None] | None = None,
    ) -> bool:
        """Deliver the cached result of a key, if there is one: now, or when it is restored.

        :param arguments: descriptors in them belong to this object then.
        :param again: called when it is restored, or lost; by default :meth:`enter`.
        """
        stored = self._objects.lookup(key) if key is not None else None
        if stored is None:
            return False
        if stored.tier != "device" or (self._objects.contended and self._restorer.must_wait(waiter, stored)):
            again = again or functools.partial(self.enter, waiter, spec, key, arguments, chain)
            self._restorer.when_warm(
                waiter, stored, again, functools.partial(self._not_restored, spec, arguments), rebuilds=True
            )
            return True
        self.statistics.of(spec.name)["hits"] += 1
        if waiter.observed is not None:
            waiter.observed.how = "hit"
        self._deliver([waiter], spec, stored.record, stored.live, stored)
        close_arguments(arguments)
        return True

    def _not_restored(self, spec: EndpointSpec, arguments: CallArguments, failure: Failure | None) -> None:
        close_arguments(arguments)
        if failure is not None:
            self.statistics.of(spec.name)["errors"] += 1

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that no longer waits. Work that has not begun is dropped with its last."""
        run, waiter.run = waiter.run, None
        if run is None:
            self._restorer.leave(waiter)
            return
        unwanted = self.calls.leave(run, waiter)
        if run in self._awaiting:
            if not run.waiters:
                self._give_up_result(run)
        elif unwanted:
            self.drop(run)
        elif not run.waiters and not run.over and not run.miss:
            self._abandon(run)

    def _withdraw(self, run: Run[Waiter]) -> None:
        """Take a run back that has not begun."""
        run.over = True
        if run.miss:
            self._unasked(run)
        if not self._capacity.leave(run):
            self._executor.withdraw(run)
        self._end_reservation(run)
        close_arguments(run.arguments)

    def _abandon(self, run: Run[Waiter]) -> None:
        """Drop the result of a run without waiters, if it waits for memory."""
        if self._executor.abandon(run):
            run.over = True
            self.calls.close(run)
            self._count_build(run)
            self._end_reservation(run)
            self._next_turn(run)

    def infos(self, limit: int) -> list[RunInfo]:
        """Return the oldest of the runs that have not ended."""
        oldest = sorted(self.calls, key=lambda run: run.created_at)[:limit]
        return [_info(run, time.time() - time.monotonic()) for run in oldest]

    def ask_to_stop(self, run: Run[Waiter]) -> None:
        """Ask a run that has begun to stop. It is of no use to others from here on: later calls of its key do not join it."""
        self.calls.part(run)
        self._executor.cancel(run)

    def began(self, run: Run[Waiter]) -> None:
        self.statistics.of(run.spec.name)["builds"] += 1
        run.running, run.begun_at = True, time.monotonic()
        if HOOKS.registered:
            HOOKS.emit(
                BuildStarted(
                    server_id=self._server_id,
                    endpoint=run.spec.name,
                    request_id=run.request_id,
                    cached=run.key is not None,
                )
            )
        for waiter in tuple(run.waiters):
            if waiter.on_begin is not None:
                waiter.on_begin()

    def progressed(self, run: Run[Waiter], progress: Progress) -> None:
        run.progress = progress
        for waiter in tuple(run.waiters):
            if waiter.on_progress is not None:
                waiter.on_progress(progress)

    def out_of_memory(self, run: Run[Waiter], why: str) -> None:
        # The endpoint itself has ended: the next run need not wait for memory that this one's caller holds.
        self._next_turn(run)
        for waiter in tuple(run.waiters):
            if waiter.on_out_of_memory is not None:
                waiter.on_out_of_memory(why)
        if not run.waiters:  # they have left while the endpoint ran
            self._abandon(run)

    def ended(self, run: Run[Waiter], outcome: Completed | Failure) -> None:
        run.over = True
        if run.running:
            self._count_build(run, outcome.code if isinstance(outcome, Failure) else "")
        if isinstance(outcome, Completed) and outcome.record is not None and not run.waiters:
            self._executor.take_back(run, outcome.record)
        if run in self.calls.runs:
            self._finish(run, outcome)
        elif isinstance(outcome, Completed) and outcome.record is not None:
            outcome.record.close()  # the server has stopped
        if run.spec.concurrency != "parallel":
            self._next_turn(run)

    def _count_build(self, run: Run[Waiter], error: str = "") -> None:
        seconds = time.monotonic() - run.begun_at
        self.statistics.of(run.spec.name)["build_seconds"] += seconds
        if HOOKS.registered:
            HOOKS.emit(
                BuildFinished(
                    server_id=self._server_id,
                    endpoint=run.spec.name,
                    request_id=run.request_id,
                    cached=run.key is not None,
                    seconds=seconds,
                    error=error,
                )
            )

    def _next_turn(self, run: Run[Waiter]) -> None:
        """Start the next run of a serialized endpoint: one ended, or will not be."""
        spec = run.spec
        if spec.concurrency == "parallel":
            return
        line = self._lines.get(spec.name, deque())
        if run not in line:  # the server has stopped
            return
        had_turn = line[0] is run
        line.remove(run)
        if not line:
            del self._lines[spec.name]
        elif had_turn:
            self._start(line[0])

    def _finish(self, run: Run[Waiter], outcome: Completed | Failure) -> None:
        had_turn = self._end_reservation(run)
        if isinstance(outcome, Failure):
            self._close(run, outcome)
            return
        record, waiters = outcome.record, tuple(run.waiters)
        kept = run.key is not None or (run.spec.managed and waiters) or any(one.keeps or one.prepares for one in waiters)
        if record is None or not kept:
            self._deliver(self.calls.close(run), run.spec, record, outcome.live, None)
            if record is not None:
                record.close()
            return
        self._awaiting[run] = outcome
        sizes, descriptors = self._capacity.needs_of(record)
        self._capacity.ask(
            run,
            sizes,
            functools.partial(self._keep, run),
            functools.partial(self._refuse, run),
            descriptors=descriptors,
            first=had_turn or any(waiter.inner for waiter in waiters),
        )
        if not run.waiters:
            self._give_up_result(run)

    def _end_reservation(self, run: Run[Waiter]) -> bool:
        """End the reservation for a run's result; False if there was none."""
        reservation, run.reservation = run.reservation, None
        if reservation is not None:
            reservation.release()
        return reservation is not None

    def _give_up_result(self, run: Run[Waiter]) -> None:
        """Drop the result of a run without waiters, if it waits for capacity: it must not hold up other requests."""
        outcome = self._awaiting.pop(run, None)
        if outcome is not None:
            self._capacity.leave(run)
            self.calls.close(run)
            self._discard(outcome.record)

    def _refuse(self, run: Run[Waiter], refusal: Failure) -> None:
        """End a run whose result cannot be kept."""
        self._discard(self._awaiting.pop(run).record)
        self._close(run, refusal)

    def _discard(self, record: Record | None) -> None:
        if record is not None:
            record.close()
        self._executor.reclaim()

    def _keep(self, run: Run[Waiter], reservation: Reservation) -> None:
        """Keep the result of a run, for which there is capacity."""
        outcome = self._awaiting.pop(run)
        spec, key, record = run.spec, run.key, outcome.record
        assert record is not None, "a result without a record takes no memory"
        waiters = self.calls.close(run)
        if self._capacity.evicts and (key or run.former_key):
            self._remember(key or run.former_key or "", record)
        reservation.release()
        stored = self._objects.add(
            spec.name,
            key or run.former_key,
            record,
            spec.idle_ttl,
            outcome.live,
            run=run.number,
            listed=key is not None,
            managed=spec.managed,
            adopted=run.adopted,
            candidate=run.prepares,
            host_copy=spec.host_copy,
            pinned=spec.pinned,
        )
        stored.invalidated = run.invalidated
        self._deliver(waiters, spec, record, outcome.live, stored)
        if stored.listed:
            self._listed(stored)
        self._settle(stored.object_id)

    def _remember(self, key: str, record: Record) -> None:
        """Note what a key's result took."""
        self._sizes.pop(key, None)
        self._sizes[key] = self._capacity.needs_of(record)[0]
        if len(self._sizes) > _KNOWN_SIZES:
            self._sizes.popitem(last=False)

    def _close(self, run: Run[Waiter], failure: Failure) -> None:
        self._tell_all(run.spec.name, self.calls.close(run), failure)

    def _tell_all(self, endpoint: str, waiters: Sequence[Waiter], failure: Failure) -> None:
        self.statistics.of(endpoint)["errors"] += len(waiters)
        for waiter in waiters:
            tell(waiter, failure)

    def _deliver(
        self, waiters: Sequence[Waiter], spec: EndpointSpec, record: Record | None, live: Any, stored: StoredObject | None
    ) -> None:
        managed = spec.managed and stored is not None
        if stored is not None:
            # All leases before any delivery: a waiter that releases its lease at once must not drop the others' object.
            for waiter in waiters:
                if (managed and not waiter.refreshes) or waiter.keeps or waiter.prepares:
                    self._leases.grant(waiter.session, stored.object_id)
        if len(waiters) > 1:
            # Tasks last: a task's lease may be all that keeps the record, and its delivery may end that lease.
            waiters = sorted(waiters, key=lambda waiter: waiter.keeps)
        for waiter in waiters:
            tell(waiter, Delivery(record, live, stored, managed and not waiter.refreshes))


def tell(waiter: Waiter, outcome: Delivery | Failure) -> None:
    """Deliver. An error of one waiter must not affect the next one, nor end the server."""
    waiter.run = None
    if waiter.observed is not None:
        waiter.observed.told(outcome)
    try:
        waiter.deliver(outcome)
    except Exception:
        _log.exception("the callback of a waiter of session %s failed", waiter.session)


def _info(run: Run[Waiter], epoch: float) -> RunInfo:
    """Describe a run; ``epoch`` is the Unix time at which the monotonic clock was at zero."""
    progress = run.progress
    tasks = [waiter.session.removeprefix(TASK_SESSION) for waiter in run.waiters if waiter.keeps]
    return {
        "endpoint": run.spec.name,
        "cache_key": run.key or run.former_key,
        "status": "running" if run.running else "asked" if run.miss else "pending",
        "created_at": run.created_at,
        "started_at": epoch + run.begun_at if run.running else None,
        "calls": len(run.waiters) - len(tasks),
        "tasks": tasks,
        "progress": cast(ProgressInfo, msgspec.structs.asdict(progress)) if progress is not None else None,
    }


def close_arguments(arguments: CallArguments) -> None:
    """Close the descriptors of unused arguments."""
    if isinstance(arguments, Arguments):
        arguments.close()
