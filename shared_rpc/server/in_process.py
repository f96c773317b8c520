"""Running endpoints in this process."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shared_rpc.endpoints import Endpoint
from shared_rpc.errors import ConnectionClosed, SharedRPCError, TaskCancelled
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import PoolFull
from shared_rpc.reaper import REAPER
from shared_rpc.records import EMPTY_TABLE, Arguments, Record
from shared_rpc.running import CURRENT_RUN, Run
from shared_rpc.server.coroutines import Coroutines
from shared_rpc.server.executor import Invocation
from shared_rpc.server.lanes import Lanes
from shared_rpc.server.outcomes import Failure, Produced, Starving
from shared_rpc.server.reporter import Reporter
from shared_rpc.server.threads import Job, WorkerThreads

if TYPE_CHECKING:
    from shared_rpc.codec import Soon

__all__ = ["InProcessExecutor"]

#: Seconds that the loop waits for a result to be copied, before a thread does.
_PATIENCE = 100e-6
#: Bytes of a table of so few tensors that they are made on the loop.
_FEW = 1024


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
        lanes: Lanes,
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
            job = self._job(invocation, lambda: self._call(endpoint, invocation, run), ended, begun)
        elif not invocation.background and _loads_soon(invocation):
            begun()
            loaded = _guarded(lambda: Produced(None, _load(invocation)))
            if isinstance(loaded, Failure):
                asyncio.get_running_loop().call_soon(ended, loaded)  # which may start the next run in line, and so on
            else:
                self._await(endpoint, invocation, run, loaded, ended)
            return
        else:
            # What takes time, the arguments and the result, is done in threads all the same.
            job = Job(
                lambda: _guarded(lambda: Produced(None, _load(invocation))),
                begun,
                lambda loaded: self._await(endpoint, invocation, run, loaded, ended),
            )
        self._queued[invocation] = threads, job
        threads.start(job)

    def withdraw(self, invocation: Invocation) -> None:
        """See :class:`Executor`."""
        queued = self._queued.pop(invocation, None)
        if queued is not None:
            threads, job = queued
            threads.withdraw(job)
            if isinstance(invocation.arguments, Arguments):
                invocation.arguments.close()

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
                _let_go(invocation, outcome)
                ended(outcome)
            else:
                self._deliver(endpoint, invocation, outcome, ended)

        args, kwargs = loaded.live
        begin: list[Callable[[], Awaitable[Any]]] = [functools.partial(endpoint.function, *args, **kwargs)]
        # Who else has the arguments decides whether they can go back as they are.
        loaded.live = None
        del args, kwargs
        self._prepare()
        self._coroutines.start(invocation, run, begin, returned)

    def _deliver(
        self,
        endpoint: Endpoint,
        invocation: Invocation,
        value: list[Any],
        ended: Callable[[Produced | Failure], None],
    ) -> None:
        """End a run with what its coroutine returned: here where that is a matter of microseconds, else in a thread."""
        outcome = self._publish_soon(endpoint, invocation, value)
        if isinstance(outcome, (Produced, Failure)):
            value.clear()
            _let_go(invocation, outcome)
            ended(outcome)
            self._settle(invocation)
            return

        def publish() -> Produced:
            if outcome is not None:
                return Produced(outcome.wait(), None)
            return self._publish(endpoint, invocation, value)

        threads = self._background if invocation.background else self._threads
        threads.start(self._job(invocation, publish, ended))

    def _publish_soon(self, endpoint: Endpoint, invocation: Invocation, value: list[Any]) -> Produced | Failure | Soon | None:
        """The outcome of a run whose result needs no thread; what is to be waited for in one; or None, to begin in one."""
        lane = self._lanes.find(invocation.session) if invocation.pooled and self._shares else None
        if lane is None or endpoint.spec.access != "read_write" or "shared_rpc.codec" not in sys.modules:
            return None
        from shared_rpc.codec import Soon, publish_back, publish_soon

        try:
            if _returnable(invocation):
                record = publish_back(value, lane.borrower, _PATIENCE)
                if record is not None:
                    return Produced(record, None)
            soon = publish_soon(value[0], self._device, endpoint.spec.name, lane.results)
            record = soon.take(_PATIENCE) if isinstance(soon, Soon) else soon
            if record is None:
                return soon if isinstance(soon, Soon) else None
            return Produced(record, None)
        except PoolFull:
            return None
        except Exception as error:
            return _failure(error)

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
            return self._publish(endpoint, invocation, [starving.live])

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

        def guarded() -> Produced | Failure:
            outcome = _guarded(work)
            _let_go(invocation, outcome)
            return outcome

        return Job(guarded, begun, ended, lambda: self._settle(invocation))

    def _settle(self, invocation: Invocation) -> None:
        """See what the endpoint has done with: when its caller has been told, who need not wait for that."""
        lane = self._lanes.find(invocation.session)
        if lane is not None:
            lane.settle()

    def _call(self, endpoint: Endpoint, invocation: Invocation, run: Run) -> Produced:
        args, kwargs = _load(invocation)
        token = CURRENT_RUN.set(run)
        try:
            value = [endpoint.function(*args, **kwargs)]
        finally:
            CURRENT_RUN.reset(token)
        # The arguments' memory may be what the result replaces.
        del args, kwargs
        return self._publish(endpoint, invocation, value)

    def _publish(self, endpoint: Endpoint, invocation: Invocation, only: list[Any]) -> Produced:
        """:param only: the value, which nobody else in the library has."""
        from shared_rpc.codec import check_result, publish, publish_back

        lane = self._lanes.find(invocation.session) if invocation.pooled else None
        if lane is not None and self._shares and _returnable(invocation):
            record = publish_back(only, lane.borrower)
            if record is not None:
                return Produced(record, None)
        value = only.pop()
        if not invocation.publish or not self._shares:
            nbytes = check_result(value, endpoint.spec.name, self._kind)
            return Produced(Record(b"", EMPTY_TABLE, (), nbytes, self._device) if invocation.publish else None, value)
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


def _returnable(invocation: Invocation) -> bool:
    """Whether the result may lie where the caller has put the arguments."""
    return (
        isinstance(invocation.arguments, Arguments)
        and invocation.arguments.returnable
        and invocation.spec.access == "read_write"
    )


def _loads_soon(invocation: Invocation) -> bool:
    """Whether loading the arguments takes microseconds: there is nothing to map or to unpickle."""
    arguments = invocation.arguments
    return isinstance(arguments, tuple) or (
        "shared_rpc.codec" in sys.modules  # with torch
        and not arguments.skeletons
        and len(arguments.table) < _FEW
        and all(MAPPINGS.knows(segment.info) for segment in arguments.segments)
    )


def _load(invocation: Invocation) -> tuple[Any, Any]:
    if isinstance(invocation.arguments, tuple):
        return invocation.arguments
    from shared_rpc.codec import decode_arguments

    try:
        return decode_arguments(invocation.arguments)
    finally:
        invocation.arguments.close()


def _guarded(work: Callable[[], Produced]) -> Produced | Failure:
    """Whatever ``work`` raises, SystemExit included, as a value: nothing may get past the waiters."""
    try:
        return work()
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    return Failure.of(error) if isinstance(error, SharedRPCError) else Failure.raised(error)
