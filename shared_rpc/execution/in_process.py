"""Execution of endpoints in this process."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shared_rpc.context import CURRENT_RUN, RunContext
from shared_rpc.errors import TaskCancelled
from shared_rpc.execution.coroutines import Coroutines, end_if_forked
from shared_rpc.execution.endpoints import Endpoint
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.publishing import Publisher, guarded, load, loads_soon, release_arguments
from shared_rpc.execution.reporter import Reporter
from shared_rpc.execution.run import Owner, Run
from shared_rpc.execution.threads import Job, WorkerThreads
from shared_rpc.execution.transfer import transfers_of
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.memory.records import Arguments
from shared_rpc.protocol.infos import ExecutorInfo


class InProcessExecutor:
    """Executor in this process: ``def`` endpoints in daemon threads, ``async def`` endpoints on the server's loop.

    :param endpoints: by name.
    :param device: the id of the device of results.
    :param pool: options of each session's pool; by default the usual ones.
    :param max_workers: maximum number of endpoint threads; by default four more than there are cores, and at most 32.
    :param shares: True to move results into shared memory; False if only this process uses them.
    """

    def __init__(
        self,
        endpoints: dict[str, Endpoint],
        device: str,
        pool: PoolOptions | None = None,
        max_workers: int | None = None,
        *,
        shares: bool = True,
    ) -> None:
        self.endpoints = endpoints
        self.transfers = transfers_of(pool)
        self._publisher = Publisher(device, self.transfers, shares=shares)
        self._device = device
        self._kind = device_kind(device)
        limit = max_workers if max_workers is not None else min(32, (os.cpu_count() or 1) + 4)
        self._threads = WorkerThreads(limit, self._prepare)
        #: A second set of threads for tasks, so that a few long ones do not hold up all calls.
        self._background = WorkerThreads(limit, self._prepare, next_turn=True)
        #: Runs whose work has not begun, with their jobs.
        self._queued: dict[Run[Any], tuple[WorkerThreads, Job]] = {}
        self._coroutines = Coroutines()

    def _prepare(self) -> None:
        """Make the provider's GPU current in this thread: endpoints mean it by ``"cuda"``, and cuBLAS warns without a current
        context.
        """
        if self._kind == "cuda":
            import torch

            from shared_rpc.memory.devices import torch_device

            torch.cuda.set_device(torch_device(self._device))

    @property
    def busy(self) -> int:
        """The number of threads that run an endpoint now."""
        return self._threads.busy + self._background.busy

    @contextmanager
    def lend_thread(self) -> Iterator[None]:
        """Allow one more thread while an endpoint waits for another one, so that waiting does not exhaust ``max_workers``."""
        with self._threads.lend(), self._background.lend():
            yield

    def reclaim(self) -> None:
        FINALIZER.start()
        FINALIZER.submit(MAPPINGS.drain)

    def info(self) -> ExecutorInfo:
        return {"workers": []}

    def close(self) -> None:
        """End idle threads, after the loop has ended. Other threads end with their endpoint or with the process."""
        self._threads.close()
        self._background.close()
        self._publisher.slabs.close()

    async def finish(self) -> None:
        """End the runs on the loop, just before the loop ends."""
        await self._coroutines.finish()

    def start(self, run: Run[Any], owner: Owner) -> None:
        endpoint = self.endpoints[run.spec.name]
        reporter = Reporter(asyncio.get_running_loop(), functools.partial(owner.progressed, run))
        context = run.place = RunContext(run.chain, reporter.put, run.request_id)
        begun = functools.partial(self._begun, run, owner)
        ended = functools.partial(self._ended, run, owner, reporter)
        threads = self._background if run.background else self._threads
        if not endpoint.spec.is_async:
            job = self._job(run, functools.partial(self._call, endpoint, run, context), ended, begun)
        elif not run.background and loads_soon(run):
            begun()
            loaded = guarded(lambda: Completed(None, load(run)))
            if isinstance(loaded, Failure):
                asyncio.get_running_loop().call_soon(ended, loaded)  # soon: it may start the next queued run
            else:
                self._await(endpoint, run, context, loaded, ended)
            return
        else:
            # Mapping large arguments and publishing the result take time, so threads do that in either case.
            job = Job(
                lambda: guarded(lambda: Completed(None, load(run))),
                lambda loaded: self._await(endpoint, run, context, loaded, ended),
                begun,
            )
        self._queued[run] = threads, job
        try:
            threads.start(job)
        except RuntimeError:
            self._queued.pop(run, None)
            raise

    def _begun(self, run: Run[Any], owner: Owner) -> None:
        self._queued.pop(run, None)
        run.running = True
        owner.began(run)

    def _ended(self, run: Run[Any], owner: Owner, reporter: Reporter, outcome: Completed | Failure) -> None:
        run.place = None
        reporter.close()
        owner.ended(run, outcome)

    def withdraw(self, run: Run[Any]) -> bool:
        queued = self._queued.pop(run, None)
        if queued is None:
            return False
        threads, job = queued
        threads.withdraw(job)
        if isinstance(run.arguments, Arguments):
            run.arguments.close()
        return True

    def cancel(self, run: Run[Any]) -> None:
        """Ask a run to stop. An ``async def`` endpoint is cancelled at its current await; any other must poll."""
        if run.running and run.place is not None:
            run.place.cancelled = True
            self._coroutines.cancel(run)

    def _await(
        self,
        endpoint: Endpoint,
        run: Run[Any],
        context: RunContext,
        loaded: Completed | Failure,
        ended: Callable[[Completed | Failure], None],
    ) -> None:
        """Run an ``async def`` endpoint with its loaded arguments."""
        if isinstance(loaded, Failure):
            ended(loaded)
            return
        if context.cancelled:  # cancelled while its arguments were loaded
            ended(Failure.of(TaskCancelled()))
            return

        def returned(outcome: Failure | list[Any]) -> None:
            if isinstance(outcome, Failure):
                release_arguments(run, outcome)
                ended(outcome)
            else:
                self._deliver(endpoint, run, outcome, ended)

        args, kwargs = loaded.live
        begin: list[Callable[[], Awaitable[Any]]] = [functools.partial(endpoint.function, *args, **kwargs)]
        # The result can reuse the memory of the arguments only if there are no other references to them.
        loaded.live = None
        del args, kwargs
        try:
            self._prepare()
        except Exception as error:
            ended(Failure.unexpected(error, f"{run.spec.name}() cannot begin"))
            return
        self._coroutines.start(run, endpoint.spec.name, context, begin, returned)

    def _deliver(
        self,
        endpoint: Endpoint,
        run: Run[Any],
        value: list[Any],
        ended: Callable[[Completed | Failure], None],
    ) -> None:
        """End a run with its coroutine's result: here if publishing takes microseconds, otherwise in a thread."""
        outcome = self._publisher.publish_soon(endpoint, run, value)
        if isinstance(outcome, (Completed, Failure)):
            value.clear()
            release_arguments(run, outcome)
            ended(outcome)
            self._settle(run)
            return

        def publish() -> Completed:
            if outcome is not None:
                outcome.wait()
                return Completed(outcome.record(), None)
            return self._publisher.publish(endpoint, run, value)

        threads = self._background if run.background else self._threads
        try:
            threads.start(self._job(run, self._publisher.elsewhere(publish), ended))
        except Exception as error:  # no thread, or a failing driver
            value.clear()
            ended(Failure.unexpected(error, f"the result of {run.spec.name}() cannot be published"))

    def _job(
        self,
        run: Run[Any],
        work: Callable[[], Completed],
        ended: Callable[[Completed | Failure], None],
        begun: Callable[[], None] | None = None,
    ) -> Job:
        """Return a job whose end is the end of the run."""
        return Job(functools.partial(_outcome, run, work), ended, begun, functools.partial(self._settle, run))

    def _settle(self, run: Run[Any]) -> None:
        """Poll the chunks used by the endpoint, after the reply to its caller."""
        transfer = self.transfers.find(run.session)
        if transfer is not None:
            transfer.poll()

    def _call(self, endpoint: Endpoint, run: Run[Any], context: RunContext) -> Completed:
        args, kwargs = load(run)
        token = CURRENT_RUN.set(context)
        pid = os.getpid()
        try:
            value = [endpoint.function(*args, **kwargs)]
        finally:
            end_if_forked(pid, run.spec.name)
            CURRENT_RUN.reset(token)
        # Unused arguments are freed before the result is copied.
        del args, kwargs
        return self._publisher.publish(endpoint, run, value)


def _outcome(run: Run[Any], work: Callable[[], Completed]) -> Completed | Failure:
    # In a list that is emptied: a retained error of the endpoint's code may keep this frame.
    outcome = [guarded(work)]
    if type(outcome[0]) is Failure:
        release_arguments(run, outcome[0])
    return outcome.pop()
