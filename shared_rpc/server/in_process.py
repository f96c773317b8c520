"""Running endpoints in this process."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from shared_rpc.endpoints import Endpoint
from shared_rpc.errors import ConnectionClosed, SharedRPCError, TaskCancelled
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import PoolFull
from shared_rpc.reaper import REAPER
from shared_rpc.records import EMPTY_TABLE, Arguments, Record
from shared_rpc.running import CURRENT_RUN, Run
from shared_rpc.server.executor import Invocation
from shared_rpc.server.lanes import Lane
from shared_rpc.server.outcomes import Failure, Produced, Starving
from shared_rpc.server.reporter import Reporter
from shared_rpc.server.session_lanes import Lanes
from shared_rpc.server.threads import Job, WorkerThreads

__all__ = ["InProcessExecutor"]

#: Seconds between two cancellations of a coroutine that goes on.
_AGAIN = 0.02


class InProcessExecutor:
    """Endpoints in this process: ``def`` in daemon threads, ``async def`` on the server's loop.

    :param endpoints: by name.
    :param device: the id of the device results must be on.
    :param max_workers: how many threads run endpoints at once; by default four more than there are cores, and at most 32.
    :param lanes: the pools of sessions.
    :param shares: whether results are moved into shared memory; False where nobody but this process asks for them.
    """

    def __init__(
        self,
        endpoints: dict[str, Endpoint],
        device: str,
        lanes: Lanes[Lane],
        max_workers: int | None = None,
        *,
        shares: bool = True,
    ) -> None:
        self._endpoints = endpoints
        self._lanes = lanes
        self._device = device
        self._kind = device_kind(device)
        self._shares = shares
        limit = max_workers if max_workers is not None else min(32, (os.cpu_count() or 1) + 4)
        self._threads = WorkerThreads(limit, self._prepare)
        #: As many again for tasks: a few that take minutes must not hold up every call.
        self._background = WorkerThreads(limit, self._prepare, next_turn=True)
        self._queued: dict[Invocation, tuple[WorkerThreads, Job]] = {}
        self._runs: dict[Invocation, Run] = {}
        #: Kept here, because a loop keeps only weak references to its tasks.
        self._going: set[asyncio.Task[None]] = set()
        self._coroutines: dict[Invocation, asyncio.Task[Produced | Failure]] = {}

    def _prepare(self) -> None:
        """Make the provider's GPU the current one of this thread: an endpoint's ``"cuda"`` means it, and cuBLAS warns where no
        context is current.
        """
        if self._kind == "cuda":
            import torch

            from shared_rpc.memory.devices import torch_device

            torch.cuda.set_device(torch_device(self._device))

    @property
    def busy(self) -> int:
        """See :class:`Executor`."""
        return self._threads.busy + self._background.busy

    @contextmanager
    def lend_thread(self) -> Iterator[None]:
        """See :class:`Executor`."""
        with self._threads.lend(), self._background.lend():
            yield

    def reclaim(self) -> None:
        """See :class:`Executor`."""
        REAPER.start()
        REAPER.submit(MAPPINGS.drain)

    def facts(self) -> dict[str, Any]:
        """See :class:`Executor`."""
        return {"workers": []}

    def close(self) -> None:
        """See :class:`Executor`."""
        self._threads.close()
        self._background.close()

    async def finish(self) -> None:
        """See :class:`Executor`. A coroutine that refuses to be cancelled is cancelled again, until it gives in."""
        while self._going:
            for task in self._going:
                task.cancel()
            await asyncio.wait(self._going, timeout=_AGAIN)

    def start(self, invocation: Invocation, done: Callable[[Produced | Failure], None]) -> None:
        """See :class:`Executor`."""
        endpoint = self._endpoints[invocation.spec.name]
        loop = asyncio.get_running_loop()
        reporter = Reporter(loop, invocation.on_progress)
        run = Run(invocation.chain, reporter.put)

        def begun() -> None:
            self._queued.pop(invocation, None)
            self._runs[invocation] = run
            invocation.on_begin()

        def ended(outcome: Produced | Failure) -> None:
            self._runs.pop(invocation, None)
            reporter.close()
            if isinstance(outcome, Starving):
                self._park(endpoint, invocation, outcome, ended)
            else:
                done(outcome)

        threads = self._background if invocation.background else self._threads
        if not endpoint.spec.is_async:
            job = Job(lambda: self._settled(invocation, lambda: self._call(endpoint, invocation, run)), begun, ended)
        else:
            # What takes time, the arguments and the result, is done in threads all the same.
            job = Job(
                lambda: _guarded(lambda: Produced(None, _load(invocation))),
                begun,
                lambda loaded: self._go_on(loop, self._run_async(endpoint, invocation, run, threads, loaded), ended),
            )
        self._queued[invocation] = threads, job
        threads.start(job)

    def withdraw(self, invocation: Invocation) -> bool:
        """See :class:`Executor`."""
        queued = self._queued.pop(invocation, None)
        if queued is None:
            return False
        threads, job = queued
        threads.withdraw(job)
        if isinstance(invocation.arguments, Arguments):
            invocation.arguments.close()
        return True

    def cancel(self, invocation: Invocation) -> None:
        """See :class:`Executor`. An ``async def`` endpoint is cancelled where it awaits; any other has to look."""
        run = self._runs.get(invocation)
        if run is not None:
            run.cancelled = True
            work = self._coroutines.get(invocation)
            if work is not None:
                work.cancel()

    def _go_on(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Produced | Failure],
        done: Callable[[Produced | Failure], None],
    ) -> None:
        async def finish() -> None:
            try:
                outcome = await work
            except asyncio.CancelledError:
                outcome = Failure.of(ConnectionClosed("the server was stopped before the call ended"))
            done(outcome)

        task = loop.create_task(finish())
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    async def _run_async(
        self, endpoint: Endpoint, invocation: Invocation, run: Run, threads: WorkerThreads, loaded: Produced | Failure
    ) -> Produced | Failure:
        if isinstance(loaded, Failure):
            return loaded
        if run.cancelled:  # asked while its arguments were loaded
            return Failure.of(TaskCancelled())
        args, kwargs = loaded.live
        CURRENT_RUN.set(run)
        self._prepare()
        # A task of its own: an endpoint that cancels the task it runs in must not cancel the server's.
        work = asyncio.create_task(_awaited(functools.partial(endpoint.function, *args, **kwargs), run))
        self._coroutines[invocation] = work
        try:
            outcome = await work
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            return Failure.of(TaskCancelled())  # asked before its first step
        finally:
            del self._coroutines[invocation]
        if isinstance(outcome, Failure):
            _let_go(invocation, outcome)
            return outcome
        value = outcome.live
        del args, kwargs, loaded, outcome
        return await threads.run(
            lambda: self._settled(invocation, lambda: self._publish(endpoint, invocation, value)), _nothing
        )

    def abandon(self, invocation: Invocation) -> bool:
        """See :class:`Executor`."""
        lane = self._lanes.find(invocation.session)
        return lane is not None and lane.unpark(invocation)

    def take_back(self, invocation: Invocation, record: Record) -> None:
        """See :class:`Executor`."""
        lane = self._lanes.find(invocation.session)
        if lane is not None:
            lane.give(record.chunks)

    def _park(
        self,
        endpoint: Endpoint,
        invocation: Invocation,
        starving: Starving,
        ended: Callable[[Produced | Failure], None],
    ) -> None:
        """No thread waits for memory meanwhile: a client that holds all of it holds up nobody else."""

        def publish() -> Produced:
            return self._publish(endpoint, invocation, starving.live)

        job = Job(lambda: self._settled(invocation, publish), _nothing, ended)
        lane = self._lanes.find(invocation.session)
        if lane is None:
            ended(Failure.of(ConnectionClosed("the session ended before its result had room")))
            return
        lane.park(invocation, lambda: self._threads.start(job), starving.frees)
        invocation.on_starved(starving.why)

    def _settled(self, invocation: Invocation, work: Callable[[], Produced]) -> Produced | Failure:
        outcome = _guarded(work)
        _let_go(invocation, outcome)
        lane = self._lanes.find(invocation.session)
        if lane is not None:
            lane.settle()
        return outcome

    def _call(self, endpoint: Endpoint, invocation: Invocation, run: Run) -> Produced:
        args, kwargs = _load(invocation)
        token = CURRENT_RUN.set(run)
        try:
            value = endpoint.function(*args, **kwargs)
        finally:
            CURRENT_RUN.reset(token)
        # The arguments' memory may be what the result replaces.
        del args, kwargs
        return self._publish(endpoint, invocation, value)

    def _publish(self, endpoint: Endpoint, invocation: Invocation, value: Any) -> Produced:
        from shared_rpc.codec import check_result, publish

        if not invocation.publish or not self._shares:
            nbytes = check_result(value, endpoint.spec.name, self._kind)
            return Produced(Record(b"", EMPTY_TABLE, (), nbytes, self._device) if invocation.publish else None, value)
        lane = self._lanes.find(invocation.session) if invocation.pooled else None
        if lane is None:
            return Produced(publish(value, self._device, endpoint.spec.access, endpoint.spec.name), value)
        for again in (True, False):
            try:
                return Produced(publish(value, self._device, endpoint.spec.access, endpoint.spec.name, lane.results), None)
            except PoolFull as full:
                if not (again and lane.reclaim()):
                    return Starving(None, value, str(full), full.frees)
        raise AssertionError("it was published, or it starves")


def _let_go(invocation: Invocation, outcome: Produced | Failure) -> None:
    """A caller in another process gets a traceback as text, and its memory back at once."""
    if isinstance(outcome, Failure) and isinstance(invocation.arguments, Arguments):
        outcome.clear_frames()


def _nothing() -> None:
    pass


def _load(invocation: Invocation) -> tuple[Any, Any]:
    if isinstance(invocation.arguments, tuple):
        return invocation.arguments
    from shared_rpc.codec import decode_arguments

    try:
        return decode_arguments(invocation.arguments)
    finally:
        invocation.arguments.close()


async def _awaited(begin: Callable[[], Awaitable[Any]], run: Run) -> Produced | Failure:
    """:func:`_guarded` for what is awaited. SystemExit would end the loop, and every waiter would hang."""
    try:
        return Produced(None, await begin())
    except SharedRPCError as error:
        return Failure.of(error)
    except asyncio.CancelledError as error:
        return Failure.of(TaskCancelled()) if run.cancelled else Failure.raised(error)
    except BaseException as error:
        return Failure.raised(error)


def _guarded(work: Callable[[], Produced]) -> Produced | Failure:
    """Whatever ``work`` raises, SystemExit included, as a value: nothing may get past the waiters."""
    try:
        return work()
    except SharedRPCError as error:
        return Failure.of(error)
    except BaseException as error:
        return Failure.raised(error)
