"""Execution of endpoints in this process."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from shared_rpc.context import CURRENT_RUN, RunContext
from shared_rpc.errors import TaskCancelled
from shared_rpc.execution.coroutines import Coroutines, end_if_forked
from shared_rpc.execution.endpoints import Endpoint
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.publishing import Publisher, guarded, load, loads_soon, release_arguments
from shared_rpc.execution.run import Owner, Run
from shared_rpc.execution.threads import Job, WorkerThreads
from shared_rpc.execution.transfer import ServerTransfer, Transfers
from shared_rpc.forks import fork_safe_lock
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.memory.records import Arguments
from shared_rpc.protocol.infos import ExecutorInfo
from shared_rpc.protocol.tasks import Progress

#: Seconds between two reports of a run.
_PERIOD = 0.05
#: Shared by all reporters: it is held for less than a microsecond, and creating a lock takes as long.
_lock = fork_safe_lock()


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
        self.transfers = Transfers(lambda session: ServerTransfer(pool or PoolOptions()))
        self.publisher = Publisher(device, self.transfers, shares=shares)
        self._device = device
        self._kind = device_kind(device)
        limit = max_workers if max_workers is not None else min(32, (os.cpu_count() or 1) + 4)
        self.threads = WorkerThreads(limit, self.prepare)
        #: A second set of threads for tasks, so that a few long ones do not hold up all calls.
        self.background = WorkerThreads(limit, self.prepare, next_turn=True)
        #: Runs whose work has not begun, with their jobs.
        self.queued: dict[Run[Any], tuple[WorkerThreads, Job]] = {}
        self.coroutines = Coroutines()

    def prepare(self) -> None:
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
        return self.threads.busy + self.background.busy

    @contextmanager
    def lend_thread(self) -> Iterator[None]:
        """Allow one more thread while an endpoint waits for another one, so that waiting does not exhaust ``max_workers``."""
        with self.threads.lend(), self.background.lend():
            yield

    def reclaim(self) -> None:
        FINALIZER.start()
        FINALIZER.submit(MAPPINGS.drain)

    def info(self) -> ExecutorInfo:
        return {"workers": []}

    def close(self) -> None:
        """End idle threads, after the loop has ended. Other threads end with their endpoint or with the process."""
        self.threads.close()
        self.background.close()
        self.publisher.slabs.close()

    async def finish(self) -> None:
        """End the runs on the loop, just before the loop ends."""
        await self.coroutines.finish()

    def start(self, run: Run[Any], owner: Owner) -> None:
        _Execution(self, run, owner).start()

    def withdraw(self, run: Run[Any]) -> bool:
        queued = self.queued.pop(run, None)
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
            self.coroutines.cancel(run)


class Reporter(msgspec.Struct, eq=False):
    """Forwards reports from any thread to the loop: the latest one of each period, and the last one.

    :param report: called on the loop.
    """

    _loop: asyncio.AbstractEventLoop
    _send: Callable[[Progress], None]
    #: The report that was not sent yet, if any.
    _latest: Progress | None = None
    #: True while a call of :meth:`_flush` is pending.
    _scheduled: bool = False
    _timer: asyncio.TimerHandle | None = None
    _closed: bool = False

    def put(self, progress: Progress) -> None:
        """Report, from any thread. Ignored after the end of the run or of the loop."""
        with _lock:
            if self._closed:
                return
            self._latest = progress
            if self._scheduled:
                return
            self._scheduled = True
        with suppress(RuntimeError):  # the loop is closed: the server stopped during the run
            self._loop.call_soon_threadsafe(self._flush)

    def close(self) -> None:
        """Send any deferred report at the end of the run. On the loop."""
        with _lock:
            self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._flush()

    def _flush(self) -> None:
        with _lock:
            latest, self._latest = self._latest, None
            self._scheduled = latest is not None
        if latest is not None:
            self._send(latest)
            if not self._closed:
                self._timer = self._loop.call_later(_PERIOD, self._flush)


class _Execution:
    """The execution of one run. On the loop, except for what its threads do."""

    def __init__(self, executor: InProcessExecutor, run: Run[Any], owner: Owner) -> None:
        self._executor, self._run, self._owner = executor, run, owner
        self._endpoint = executor.endpoints[run.spec.name]
        self._reporter = Reporter(asyncio.get_running_loop(), functools.partial(owner.progressed, run))
        self._context = run.place = RunContext(run.chain, self._reporter.put, run.request_id)
        self._threads = executor.background if run.background else executor.threads

    def start(self) -> None:
        run, queued = self._run, self._executor.queued
        if not self._endpoint.spec.is_async:
            job = self._job(self._call, self._begun)
        elif not run.background and loads_soon(run):
            self._begun()
            loaded = self._load()
            if isinstance(loaded, Failure):
                asyncio.get_running_loop().call_soon(self._ended, loaded)  # soon: it may start the next queued run
            else:
                self._await(loaded)
            return
        else:
            # Mapping large arguments and publishing the result take time, so threads do that in either case.
            job = Job(self._load, self._await, self._begun)
        queued[run] = self._threads, job
        try:
            self._threads.start(job)
        except RuntimeError:
            queued.pop(run, None)
            raise

    def _begun(self) -> None:
        self._executor.queued.pop(self._run, None)
        self._owner.began(self._run)

    def _ended(self, outcome: Completed | Failure) -> None:
        self._run.place = None
        self._reporter.close()
        self._owner.ended(self._run, outcome)

    def _load(self) -> Completed | Failure:
        return guarded(lambda: Completed(None, load(self._run)))

    def _await(self, loaded: Completed | Failure) -> None:
        """Run an ``async def`` endpoint with its loaded arguments."""
        if isinstance(loaded, Failure):
            self._ended(loaded)
            return
        if self._context.cancelled:  # while its arguments were loaded
            self._ended(Failure.of(TaskCancelled()))
            return
        args, kwargs = loaded.live
        begin: list[Callable[[], Awaitable[Any]]] = [functools.partial(self._begin, *args, **kwargs)]
        # The result can reuse the memory of the arguments only if there are no other references to them.
        loaded.live = None
        del args, kwargs
        self._executor.coroutines.start(self._run, self._run.spec.name, self._context, begin, self._returned)

    def _begin(self, /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call an ``async def`` endpoint in its task's first step: other providers' runs may begin before that."""
        self._executor.prepare()
        coroutine: Awaitable[Any] = self._endpoint.function(*args, **kwargs)
        return coroutine

    def _returned(self, value: Failure | list[Any]) -> None:
        """End the run with its coroutine's result: here if publishing takes microseconds, otherwise in a thread."""
        if isinstance(value, Failure):
            release_arguments(self._run, value)
            self._ended(value)
            return
        publisher = self._executor.publisher
        outcome = publisher.publish_soon(self._endpoint, self._run, value)
        if isinstance(outcome, (Completed, Failure)):
            value.clear()
            release_arguments(self._run, outcome)
            self._ended(outcome)
            self._settle()
            return

        def publish() -> Completed:
            if outcome is not None:
                outcome.wait()
                return Completed(outcome.record(), None)
            return publisher.publish(self._endpoint, self._run, value)

        try:
            self._threads.start(self._job(publisher.elsewhere(publish)))
        except Exception as error:  # no thread, or a failing driver
            value.clear()
            self._ended(Failure.unexpected(error, f"the result of {self._run.spec.name}() cannot be published"))

    def _job(self, work: Callable[[], Completed], begun: Callable[[], None] | None = None) -> Job:
        """Return a job whose end is the end of the run."""
        return Job(functools.partial(_outcome, self._run, work), self._ended, begun, self._settle)

    def _settle(self) -> None:
        """Poll the chunks used by the endpoint, after the reply to its caller."""
        transfer = self._executor.transfers.find(self._run.session)
        if transfer is not None:
            transfer.poll()

    def _call(self) -> Completed:
        run = self._run
        args, kwargs = load(run)
        token = CURRENT_RUN.set(self._context)
        pid = os.getpid()
        try:
            value = [self._endpoint.function(*args, **kwargs)]
        finally:
            end_if_forked(pid, run.spec.name)
            CURRENT_RUN.reset(token)
        # Unused arguments are freed before the result is copied.
        del args, kwargs
        return self._executor.publisher.publish(self._endpoint, run, value)


def _outcome(run: Run[Any], work: Callable[[], Completed]) -> Completed | Failure:
    # In a list that is emptied: a retained error of the endpoint's code may keep this frame.
    outcome = [guarded(work)]
    if type(outcome[0]) is Failure:
        release_arguments(run, outcome[0])
    return outcome.pop()
