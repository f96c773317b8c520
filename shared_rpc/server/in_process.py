"""Running endpoints in this process."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shared_rpc.context import CURRENT_RUN, Run
from shared_rpc.errors import ConnectionClosed, TaskCancelled
from shared_rpc.lifecycle.finalizer import REAPER
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol.records import Arguments, Record
from shared_rpc.server.coroutines import Coroutines
from shared_rpc.server.endpoints import Endpoint
from shared_rpc.server.executor import Invocation
from shared_rpc.server.forks import end_if_forked
from shared_rpc.server.lanes import Lane
from shared_rpc.server.outcomes import Failure, Produced, Starving
from shared_rpc.server.publishing import Publisher, guarded, let_go, load, loads_soon
from shared_rpc.server.reporter import Reporter
from shared_rpc.server.session_lanes import Lanes
from shared_rpc.server.threads import Job, WorkerThreads

__all__ = ["InProcessExecutor"]


def _nothing() -> None:
    pass


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
        self._publisher = Publisher(device, lanes, shares=shares)
        self._device = device
        self._kind = device_kind(device)
        limit = max_workers if max_workers is not None else min(32, (os.cpu_count() or 1) + 4)
        self._threads = WorkerThreads(limit, self._prepare)
        #: As many again for tasks: a few that take minutes must not hold up every call.
        self._background = WorkerThreads(limit, self._prepare, next_turn=True)
        self._queued: dict[Invocation, tuple[WorkerThreads, Job]] = {}
        self._runs: dict[Invocation, Run] = {}
        self._coroutines = Coroutines()

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
        """See :class:`Executor`."""
        await self._coroutines.finish()

    def start(self, invocation: Invocation, done: Callable[[Produced | Failure], None]) -> None:
        """See :class:`Executor`."""
        endpoint = self._endpoints[invocation.spec.name]
        reporter = Reporter(asyncio.get_running_loop(), invocation.on_progress)
        run = Run(invocation.chain, reporter.put, invocation.request_id)

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
            job = self._job(invocation, lambda: self._call(endpoint, invocation, run), ended, begun)
        elif not invocation.background and loads_soon(invocation):
            begun()
            loaded = guarded(lambda: Produced(None, load(invocation)))
            if isinstance(loaded, Failure):
                asyncio.get_running_loop().call_soon(ended, loaded)  # which may start the next run in line, and so on
            else:
                self._await(endpoint, invocation, run, loaded, ended)
            return
        else:
            # What takes time, the arguments and the result, is done in threads all the same.
            job = Job(
                lambda: guarded(lambda: Produced(None, load(invocation))),
                begun,
                lambda loaded: self._await(endpoint, invocation, run, loaded, ended),
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
            self._coroutines.cancel(invocation)

    def _await(
        self,
        endpoint: Endpoint,
        invocation: Invocation,
        run: Run,
        loaded: Produced | Failure,
        ended: Callable[[Produced | Failure], None],
    ) -> None:
        """Run an ``async def`` endpoint with the arguments that were loaded."""
        if isinstance(loaded, Failure):
            ended(loaded)
            return
        if run.cancelled:  # asked while its arguments were loaded
            ended(Failure.of(TaskCancelled()))
            return

        def returned(outcome: Failure | list[Any]) -> None:
            if isinstance(outcome, Failure):
                let_go(invocation, outcome)
                ended(outcome)
            else:
                self._deliver(endpoint, invocation, outcome, ended)

        args, kwargs = loaded.live
        begin: list[Callable[[], Awaitable[Any]]] = [functools.partial(endpoint.function, *args, **kwargs)]
        # Who else has the arguments decides whether they can go back as they are.
        loaded.live = None
        del args, kwargs
        self._prepare()
        self._coroutines.start(invocation, endpoint.spec.name, run, begin, returned)

    def _deliver(
        self,
        endpoint: Endpoint,
        invocation: Invocation,
        value: list[Any],
        ended: Callable[[Produced | Failure], None],
    ) -> None:
        """End a run with what its coroutine returned: here where that is a matter of microseconds, else in a thread."""
        outcome = self._publisher.publish_soon(endpoint, invocation, value)
        if isinstance(outcome, (Produced, Failure)):
            value.clear()
            let_go(invocation, outcome)
            ended(outcome)
            self._settle(invocation)
            return

        def publish() -> Produced:
            if outcome is not None:
                return Produced(outcome.wait(), None)
            return self._publisher.publish(endpoint, invocation, value)

        threads = self._background if invocation.background else self._threads
        threads.start(self._job(invocation, self._publisher.elsewhere(publish), ended))

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
            return self._publisher.publish(endpoint, invocation, [starving.live])

        job = self._job(invocation, publish, ended)
        lane = self._lanes.find(invocation.session)
        if lane is None:
            ended(Failure.of(ConnectionClosed("the session ended before its result had room")))
            return
        lane.park(invocation, lambda: self._threads.start(job), starving.frees)
        invocation.on_starved(starving.why)

    def _job(
        self,
        invocation: Invocation,
        work: Callable[[], Produced],
        ended: Callable[[Produced | Failure], None],
        begun: Callable[[], None] = _nothing,
    ) -> Job:
        """What is done in a thread of a run that ends with it."""

        def settled() -> Produced | Failure:
            # In a list that is emptied: an error of the endpoint's code that somebody keeps keeps this frame.
            outcome = [guarded(work)]
            let_go(invocation, outcome[0])
            return outcome.pop()

        return Job(settled, begun, ended, lambda: self._settle(invocation))

    def _settle(self, invocation: Invocation) -> None:
        """See what the endpoint has done with: when its caller has been told, who need not wait for that."""
        lane = self._lanes.find(invocation.session)
        if lane is not None:
            lane.settle()

    def _call(self, endpoint: Endpoint, invocation: Invocation, run: Run) -> Produced:
        args, kwargs = load(invocation)
        token = CURRENT_RUN.set(run)
        pid = os.getpid()
        try:
            value = [endpoint.function(*args, **kwargs)]
        except BaseException as error:
            end_if_forked(pid, error)
            raise
        finally:
            CURRENT_RUN.reset(token)
        end_if_forked(pid)
        # The arguments' memory may be what the result replaces.
        del args, kwargs
        return self._publisher.publish(endpoint, invocation, value)
