"""Runs: a call is answered from the cache, joins a run of its key, or starts one; its result is then published."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shared_rpc.errors import SharedRPCError, StaleHandleError
from shared_rpc.execution.device_memory import frees_are_pending, until_freed
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.run import CallArguments, Run
from shared_rpc.memory.records import Arguments, Record
from shared_rpc.protocol.infos import EndpointStatistics, RunInfo, ServerStatistics
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.tasks import Progress
from shared_rpc.server.capacity import CapacityRequest, Reservation
from shared_rpc.server.generations import Generations
from shared_rpc.server.shared import State
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.tiers import Tiers
from shared_rpc.server.waiting import Delivery, Waiter, gone, resolve

_log = logging.getLogger("shared_rpc.server")


def _zeros() -> EndpointStatistics:
    return EndpointStatistics(calls=0, hits=0, misses=0, joined=0, adopted=0, builds=0, build_seconds=0.0, errors=0)


class Statistics:
    """Counts of calls since the server's start, by endpoint ever registered. These counts are always kept.

    :ivar refused: calls of an unregistered name, or with arguments that do not fit.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[str, EndpointStatistics] = defaultdict(_zeros)
        #: Returns the counts of a registered endpoint, to be read or added to.
        self.of: Callable[[str], EndpointStatistics] = self._counts.__getitem__
        self.refused = 0

    def infos(self) -> dict[str, EndpointStatistics]:
        """Return a copy of all counts, by endpoint name."""
        return {name: counts.copy() for name, counts in self._counts.items()}

    def totals(self) -> ServerStatistics:
        """Return the sums over all endpoints."""
        counts = self._counts.values()
        return {
            "calls": sum(count["calls"] for count in counts) + self.refused,
            "cache_hits": sum(count["hits"] for count in counts),
            "joined": sum(count["joined"] for count in counts),
            "builds": sum(count["builds"] for count in counts),
            "failures": sum(count["errors"] for count in counts) + self.refused,
        }

    def __iter__(self) -> Iterator[tuple[str, EndpointStatistics]]:
        return iter(self._counts.items())


class Runs:
    """All runs of a server. On its loop only.

    :param tiers: restores cold results.
    :param generations: announces the results that the cache lists.
    """

    def __init__(self, state: State, tiers: Tiers, generations: Generations) -> None:
        self.calls = state.runs
        self.statistics = Statistics()
        self._state = state
        self._executor = state.executor
        self._objects = state.objects
        self._capacity = state.capacity
        self._tiers = tiers
        self._generations = generations
        #: Offers a run to the source of records; returns False if it must be built here.
        self.ask: Callable[[Run[Waiter]], bool]
        #: For each serialized endpoint, the run whose turn it is, and the runs queued behind it.
        self._lines: defaultdict[str, deque[Run[Waiter]]] = defaultdict(deque)

    def stop(self) -> None:
        """Release every waiter."""
        failure = Failure.of(gone("ended"))
        for run in self.calls:
            if not run.over and not run.running:
                self._withdraw(run)
            self._close(run, failure)
        self._lines.clear()

    def enter(
        self, waiter: Waiter, spec: EndpointSpec, key: str | None, arguments: CallArguments, chain: frozenset[str]
    ) -> None:
        """Answer from the cache, join a run, or start one. The waiter is notified exactly once, perhaps before this returns.

        :param arguments: this object takes ownership of their descriptors.
        """
        stored = self._objects.lookup(key) if key is not None and not (waiter.refreshes or waiter.prepares) else None
        if stored is None or key is None:
            self._build(waiter, spec, key, arguments, chain)
        elif not stored.cold and (waiter.inner or not self._capacity.must_wait(waiter.session, stored)):
            self._hit(waiter, spec, stored)
            close_arguments(arguments)
        else:
            self._state.waits.begin(waiter, self._enter_warm(waiter, stored, spec, key, arguments, chain))

    async def _enter_warm(
        self,
        waiter: Waiter,
        stored: StoredObject | None,
        spec: EndpointSpec,
        key: str,
        arguments: CallArguments,
        chain: frozenset[str],
    ) -> None:
        """Answer with the cached result of a key once it is on its device; rebuild one that cannot be restored."""
        unused: CallArguments | None = arguments
        try:
            if waiter not in self._state.waits:  # it left before this began
                return
            while stored is not None:
                try:
                    async with self._tiers.warm(waiter, stored, first=waiter.inner):
                        stored = self._objects.lookup(key)
                        if stored is not None and not stored.cold:
                            self._hit(waiter, spec, stored)
                            return
                except StaleHandleError as error:
                    _log.debug("%s is built again: %s", key, error)
                    stored = self._objects.lookup(key)
            unused = None
            self._build(waiter, spec, key, arguments, chain)
        except Exception as error:
            self.statistics.of(spec.name)["errors"] += 1
            resolve(waiter, Failure.unexpected(error, f"the result of {spec.name}() cannot be restored"))
        finally:
            if unused is not None:
                close_arguments(unused)

    def _hit(self, waiter: Waiter, spec: EndpointSpec, stored: StoredObject) -> None:
        """Answer from the cache."""
        self.statistics.of(spec.name)["hits"] += 1
        waiter.how = "hit"
        self._deliver([waiter], spec, stored.record, stored.live, stored)

    def _build(
        self, waiter: Waiter, spec: EndpointSpec, key: str | None, arguments: CallArguments, chain: frozenset[str]
    ) -> None:
        """Join a run, or start one."""
        fresh = waiter.refreshes or waiter.prepares
        if spec.singleflight and (key is not None or waiter.refreshes) and not waiter.prepares:
            run = self.calls.join(waiter.arguments if waiter.refreshes else key, waiter, refresh=waiter.refreshes)
            if run is not None:
                close_arguments(arguments)
                self._joined(waiter, run)
                return
        if key is not None and not fresh:
            self.statistics.of(spec.name)["misses"] += 1
        run = waiter.run = Run(
            spec,
            key,
            arguments,
            {waiter: None},
            waiter.arguments,
            publish=not waiter.local or key is not None or spec.managed or waiter.task is not None,
            chain=chain | {spec.name, key or spec.name},
            background=waiter.task is not None or fresh or spec.execution == "task",
            session=waiter.session,
            pooled=waiter.pooled and key is None and not spec.managed and waiter.task is None,
            shares_slab=self._tiers.may_share_slab(spec),
            request_id=waiter.request_id,
            cached=key is not None and not waiter.prepares,
            prepares=waiter.prepares,
            created_at=time.time(),
        )
        self.calls.open(run)
        if not (spec.managed and run.cached and not waiter.refreshes and self.ask(run)):
            self.begin(run)

    def begin(self, run: Run[Waiter]) -> None:
        """Build a run that the source of records did not deliver. A run of a serialized endpoint is queued here."""
        if run.spec.concurrency != "parallel":
            line = self._lines[run.spec.name]
            line.append(run)
            if line[0] is not run:
                return
        self._start(run)

    def _start(self, run: Run[Waiter]) -> None:
        """Start a run, once dropped memory is free if the endpoint may allocate."""
        if not run.pooled and frees_are_pending():
            self._state.waits.begin(run, self._start_later(run))
        else:
            self._execute(run)

    async def _start_later(self, run: Run[Waiter]) -> None:
        await until_freed()
        if not run.over:  # otherwise it was withdrawn before this began
            self._execute(run)

    def _execute(self, run: Run[Waiter]) -> None:
        """Pass a run to the executor. An error ends the run, since there may be no request to raise it to."""
        try:
            self._executor.start(run, self)
        except Exception as error:
            self.fail(run, Failure.unexpected(error, f"a run of {run.spec.name}() cannot be started"))

    def fail(self, run: Run[Waiter], failure: Failure) -> None:
        """End a run before its work begins."""
        close_arguments(run.arguments)
        self.ended(run, failure)

    def adopt(self, run: Run[Waiter], record: Record) -> None:
        """End a run that waited for a source of records with its record; this object takes ownership of the descriptors."""
        self._count_adoption(run)
        close_arguments(run.arguments)
        run.adopted = True
        self.ended(run, Completed(record, None))

    def _count_adoption(self, run: Run[Waiter]) -> None:
        self.statistics.of(run.spec.name)["adopted"] += 1
        for waiter in run.waiters:
            if waiter.how == "built":
                waiter.how = "adopted"

    def became_current(self, stored: StoredObject) -> None:
        """Announce the current object of a key, and answer the misses of that key with it."""
        self._generations.announce(stored)
        spec = self._state.registry.find(stored.endpoint)
        call = stored.cache_key, spec.fingerprint if spec is not None else ""
        # Including misses from before an invalidation.
        for run in [run for run in self._state.misses.values() if (run.key, run.spec.fingerprint) == call]:
            if stored.adopted:
                self._count_adoption(run)
            waiters = self.calls.close(run)
            self._withdraw(run)
            self._deliver(waiters, run.spec, stored.record, stored.live, stored)

    def drop(self, run: Run[Waiter]) -> None:
        """Drop a run that has not begun."""
        self.calls.close(run)
        self._withdraw(run)
        self._next_turn(run)

    def _joined(self, waiter: Waiter, run: Run[Waiter]) -> None:
        waiter.run = run
        self.statistics.of(run.spec.name)["joined"] += 1
        waiter.how = "joined"
        if run.running and waiter.follow is not None:
            waiter.follow(run)

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that has left. Work that has not begun is dropped with its last waiter."""
        run, waiter.run = waiter.run, None
        if run is None:
            self._state.waits.leave(waiter)
            return
        unwanted = self.calls.leave(run, waiter)
        if run.over:
            if not run.waiters:
                self._give_up_result(run)
        elif unwanted:
            self.drop(run)

    def _give_up_result(self, run: Run[Waiter]) -> None:
        """Drop the result of a run without waiters if it waits for capacity, so that it does not block other requests."""
        if self._state.waits.leave(run):
            self.calls.close(run)

    def _withdraw(self, run: Run[Waiter]) -> None:
        """Withdraw a run that has not begun."""
        run.over = True
        self._state.misses.pop(run.miss, None)
        self._state.waits.leave(run)
        self._executor.withdraw(run)
        close_arguments(run.arguments)

    def infos(self, limit: int) -> list[RunInfo]:
        """Return the oldest of the active runs."""
        oldest = sorted(self.calls, key=lambda run: run.created_at)[:limit]
        return [_info(run, time.time() - time.monotonic()) for run in oldest]

    def ask_to_stop(self, run: Run[Waiter]) -> None:
        """Ask a begun run to stop. Later calls of its key do not join it."""
        self.calls.part(run)
        self._executor.cancel(run)

    def began(self, run: Run[Waiter]) -> None:
        self.statistics.of(run.spec.name)["builds"] += 1
        run.running, run.begun_at = True, time.monotonic()
        run.report_start(self._state.server_id)
        self._followed(run)

    def progressed(self, run: Run[Waiter], progress: Progress) -> None:
        run.progress = progress
        self._followed(run)

    def _followed(self, run: Run[Waiter]) -> None:
        for waiter in tuple(run.waiters):
            if waiter.follow is not None:
                waiter.follow(run)

    def ended(self, run: Run[Waiter], outcome: Completed | Failure) -> None:
        run.over = True
        if run.running:
            seconds = time.monotonic() - run.begun_at
            self.statistics.of(run.spec.name)["build_seconds"] += seconds
            run.report_end(seconds, outcome.code if isinstance(outcome, Failure) else "", self._state.server_id)
        if isinstance(outcome, Completed) and outcome.record is not None and not run.waiters:
            self._executor.transfers.release_results(run.session, outcome.record.chunks)
        if run in self.calls.runs:
            self._finish(run, outcome)
        elif isinstance(outcome, Completed) and outcome.record is not None:
            outcome.record.close()  # the server has stopped
        self._next_turn(run)

    def _next_turn(self, run: Run[Waiter]) -> None:
        """Start the next run of a serialized endpoint, after one ended or was dropped."""
        line = self._lines.get(run.spec.name)
        if line is None or run not in line:  # of a parallel endpoint, a miss that was not answered, or the server has stopped
            return
        had_turn = line[0] is run
        line.remove(run)
        if not line:
            del self._lines[run.spec.name]
        elif had_turn:
            self._start(line[0])

    def _finish(self, run: Run[Waiter], outcome: Completed | Failure) -> None:
        if isinstance(outcome, Failure):
            self._close(run, outcome)
            return
        record, waiters = outcome.record, tuple(run.waiters)
        kept = run.cached or (run.spec.managed and waiters) or any(one.task or one.prepares for one in waiters)
        if record is None or not kept:
            self._deliver(self.calls.close(run), run.spec, record, outcome.live, None)
            if record is not None:
                record.close()
            return
        sizes, descriptors = self._capacity.needs_of(record)
        first = any(waiter.inner for waiter in waiters)
        try:
            self._capacity.require_descriptors(descriptors)
            request = self._capacity.request(run, sizes, first=first)
        except SharedRPCError as error:
            self._discard(outcome, record)
            self._close(run, Failure.of(error))
            return
        if request.granted:
            self._keep(run, outcome, record, request)
            return
        self._state.waits.begin(run, self._keep_later(run, outcome, record, request))
        if not waiters:
            self._give_up_result(run)

    async def _keep_later(self, run: Run[Waiter], outcome: Completed, record: Record, request: CapacityRequest) -> None:
        """Keep the result of a run once there is capacity for it."""
        kept = False
        try:
            await request.wait()
            if run in self.calls.runs:
                kept = True
                self._keep(run, outcome, record, request)
            else:  # it was given up before this began
                request.release()
        except SharedRPCError as error:
            self._close(run, Failure.of(error))
        finally:
            if not kept:
                self._discard(outcome, record)

    def _discard(self, outcome: Completed, record: Record) -> None:
        outcome.live = None  # the callers still hold the outcome
        record.close()
        self._executor.reclaim()

    def _keep(self, run: Run[Waiter], outcome: Completed, record: Record, reservation: Reservation) -> None:
        """Keep the result of a run, within its reservation."""
        spec = run.spec
        reservation.release()
        stored = self._objects.add(
            spec,
            run.key,
            record,
            outcome.live,
            run=run.number,
            listed=run.cached,
            adopted=run.adopted,
            candidate=run.prepares,
        )
        stored.invalidated = run.invalidated
        self._deliver(self.calls.close(run), spec, record, outcome.live, stored)
        if stored.listed:
            self.became_current(stored)
        self._state.settle(stored.object_id)

    def _close(self, run: Run[Waiter], failure: Failure) -> None:
        waiters = self.calls.close(run)
        self.statistics.of(run.spec.name)["errors"] += len(waiters)
        for waiter in waiters:
            resolve(waiter, failure)

    def _deliver(
        self, waiters: Sequence[Waiter], spec: EndpointSpec, record: Record | None, live: Any, stored: StoredObject | None
    ) -> None:
        managed = spec.managed and stored is not None
        if stored is not None:
            # All leases before any delivery: a waiter that releases its lease at once must not drop the others' object.
            for waiter in waiters:
                if (managed and not waiter.refreshes) or waiter.task is not None or waiter.prepares:
                    self._state.leases.grant(waiter.task or waiter.session, stored.object_id)
        if len(waiters) > 1:
            # Tasks last: a task's lease may be the only reference to the record, and its delivery may end that lease.
            waiters = sorted(waiters, key=lambda waiter: waiter.task is not None)
        for waiter in waiters:
            resolve(waiter, Delivery(record, live, stored, managed and not waiter.refreshes))


def _info(run: Run[Waiter], epoch: float) -> RunInfo:
    """Describe a run; ``epoch`` is the Unix time of the monotonic clock's zero."""
    tasks = [waiter.task.task_id for waiter in run.waiters if waiter.task is not None]
    return {
        "endpoint": run.spec.name,
        "cache_key": run.key,
        "status": "running" if run.running else "asked" if run.miss else "pending",
        "created_at": run.created_at,
        "started_at": epoch + run.begun_at if run.running else None,
        "calls": len(run.waiters) - len(tasks),
        "tasks": tasks,
        "progress": run.progress,
    }


def close_arguments(arguments: CallArguments) -> None:
    """Close the descriptors of unused arguments."""
    if isinstance(arguments, Arguments):
        arguments.close()
