"""The supervisor of workers: starts them, restarts them after crashes, and replaces them on a reload."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio
import anyio.abc

from shared_rpc.broker.worker import Handler, Worker, WorkerCommand
from shared_rpc.broker.zygote import WorkerZygote
from shared_rpc.errors import ConfigurationError, SharedRPCError, WorkerCrashed, from_wire
from shared_rpc.execution.child import Backoff
from shared_rpc.observability.events import HOOKS, WorkerEnded, WorkerStarted
from shared_rpc.observability.metrics import Numbers, Read
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.messages import Error, Message
from shared_rpc.zygote.process import resident_bytes

_log = logging.getLogger("shared_rpc.broker")

#: This many crashes within this many seconds are a crash loop: no worker is started during the following such period.
_LIMIT, _WINDOW = 5, 30.0
#: Seconds for workers to exit when the broker stops.
_GRACE = 0.6
#: Lifetime in seconds below which a worker counts as short-lived.
_SHORT = 10.0
#: Idle seconds after which a bare worker ends.
_UNUSED = 10.0
#: The reason for ending a worker that loads the app when another one replaces it: no fault of the worker.
_OVERTAKEN = "a later reload took its place"
#: The same for a worker of a reload in which another one failed.
_ABANDONED = "another worker of the same reload failed"
#: Seconds before the first restart, and the maximum of later pauses.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


class Spawner:
    """Starts tasks of a group from callbacks of the loop. anyio needs the group's context, which ``add_reader`` does not keep.

    An error of a task is logged and ends that task alone: the group is the broker, which holds every object. An error of a
    :meth:`vital` task ends the group.

    Create it in a task of the group.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._context = contextvars.copy_context()

    def __call__(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: object) -> None:
        """Start a task."""
        self.vital(_guarded, function, arguments)

    def vital(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        """Start a task that the broker depends on: its error ends the broker."""
        self._context.copy().run(lambda: self._tasks.start_soon(function, *arguments))


async def _guarded(function: Callable[..., Coroutine[Any, Any, Any]], arguments: tuple[object, ...]) -> None:
    try:
        await function(*arguments)
    except Exception:
        _log.exception("a background task failed; the broker continues without it: %s", function.__qualname__)


class Supervisor:
    """The workers of a broker. On its loop only.

    :param on_endpoints: called with a message about a provider from a worker of the current generation, and with the worker's
        previous message about it.
    :param on_change: called when a worker is new, has ended, or reads again after congestion, or when none will come any more.
    :param on_lost: called when a worker has ended.
    """

    def __init__(
        self,
        command: WorkerCommand,
        on_endpoints: Callable[[w.Serve, w.Serve | None], None],
        on_change: Callable[[], None],
        on_lost: Callable[[Worker, WorkerCrashed], None],
    ) -> None:
        self._handlers: dict[type[Message], Handler] = {
            w.Serve: self._serves_provider,
            w.Loaded: self._has_loaded,
            Error: self._refuses,
        }
        self._command = command
        self._count = command.options.workers
        #: Starts workers as forks.
        self.zygote = WorkerZygote(command)
        self._on_endpoints, self._on_change, self._on_lost = on_endpoints, on_change, on_lost
        #: Workers that get new runs.
        self.workers: list[Worker] = []
        #: Workers of a reload, until all of them are ready.
        self._next: list[Worker] = []
        #: Replaced workers, which only finish their runs.
        self._old: list[Worker] = []
        #: The worker without the app, if any, and the pauses before the next one.
        self._bare: Worker | None = None
        self._bare_pauses = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, _SHORT)
        self._starting_bare = anyio.Lock()
        #: Restarts after crashes, by the worker's number.
        self.restarts: Counter[int] = Counter()
        #: Number of workers that ended without a request.
        self.crashes = 0
        self._crashes: deque[float] = deque(maxlen=_LIMIT)
        self._last: WorkerCrashed | None = None
        self._pauses = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, _SHORT)
        self._stopped_until = 0.0
        #: True once any worker has loaded the app.
        self._serves = False
        self._reloading = anyio.Lock()
        self._reload: asyncio.Task[list[Worker]] | None = None
        self._stopping = False
        self._spawn: Spawner

    @property
    def all(self) -> list[Worker]:
        """All running workers."""
        return [*self.workers, *self._next, *self._old, *([self._bare] if self._bare is not None else [])]

    async def start(self, spawn: Spawner, *, wait: bool = True) -> None:
        """Start the workers; return when all of them have imported the app.

        A worker that fails after another one has loaded it counts as crashed and is restarted: the broker serves by then.

        :param spawn: runs delayed restarts.
        :param wait: False to return at once: a worker that fails to import the app then counts as crashed.
        :raises WorkerCrashed: if a worker ends before any has loaded the app, or the system refuses a first process.
        :raises ConfigurationError: if a worker refuses to serve the app.
        """
        self._spawn = spawn
        async with self._reloading:
            started = []
            for number in range(self._count):
                try:
                    started.append(await self._new(number))
                except WorkerCrashed as crash:
                    if wait and not started:
                        raise
                    self._start_again(number, crash, 0.0)
                else:
                    self.workers.append(started[-1])
            if wait:
                await _all_loaded(started)
            for worker in started:
                worker.settle()  # from now on its end is a crash

    async def _new(self, number: int, bare: bool = False) -> Worker:
        """Start a worker.

        :raises WorkerCrashed: if the system refuses a new process, a descriptor or a thread; or without Python.
        """
        command = self._command.bare if bare else self._command
        try:
            begun = None if bare else await self.zygote.begin(number)
            return Worker(command, number, self._handlers, self._ended, self._on_change, self.restarts[number], begun)
        except (OSError, RuntimeError) as error:
            raise WorkerCrashed(f"cannot start a worker: {error}") from error

    async def bare(self) -> Worker:
        """Return a worker without the app, started on demand, for copies and allocations while no other worker is available.

        It gets no runs, is not in :attr:`workers`, and ends after a period without use.

        :raises WorkerCrashed: if the system refuses a new process, or the broker stops.
        """
        async with self._starting_bare:
            if self._bare is None or self._bare.condemned:
                await anyio.sleep(self._bare_pauses.pause)
                if self._stopping:
                    raise WorkerCrashed("the broker is stopping")
                self._bare = await self._new(self._count, bare=True)
                self._spawn(self._end_unused, self._bare)
            return self._bare

    async def _end_unused(self, worker: Worker) -> None:
        """End the bare worker after a period without an order, while no memory is in use that ends with it."""
        while worker is self._bare:
            left = worker.requests.answered_at + _UNUSED - time.monotonic()
            if len(worker.requests) or worker.memory or left > 0:
                await anyio.sleep(max(left, _UNUSED / 10))
            else:
                self._bare = None
                self._old.append(worker)
                worker.retire()

    def refusal(self) -> SharedRPCError | None:
        """Return the reason why no worker will become available soon; None if one is or may become available."""
        left = self._stopped_until - time.monotonic()
        if self.workers or self._last is None or left <= 0:
            return None
        return WorkerCrashed(
            f"no worker runs: {_LIMIT} workers ended within {_WINDOW:g} s. The next one is started in {left:.0f} s, or at once "
            f"by 'shared-rpc reload'. The last end: {self._last}",
            signal=self._last.signal,
            exit_code=self._last.exit_code,
            stderr=self._last.stderr,
        )

    def _serves_provider(self, worker: Worker, message: w.Serve, frame: Frame) -> None:
        earlier = worker.served.get(message.key)
        worker.served[message.key] = message
        if worker in self.workers:
            self._on_endpoints(message, earlier)
            self._on_change()

    def _has_loaded(self, worker: Worker, message: w.Loaded, frame: Frame) -> None:
        worker.loaded = self._serves = True
        self.zygote.learn(message, worker.forked)
        if worker.state == "starting":  # otherwise it was replaced
            worker.state = "ready"
            if HOOKS.registered:
                lived = time.monotonic() - worker.started
                HOOKS.emit(WorkerStarted(number=worker.number, pid=worker.pid, seconds=lived))
        worker.settle()
        if worker in self.workers:
            self._on_change()

    def _refuses(self, worker: Worker, message: Error, frame: Frame) -> None:
        worker.refusal = from_wire(message.code, message.text, message.detail)

    def _ended(self, worker: Worker) -> None:
        if self._stopping:
            return
        crash, lived = worker.crash(), time.monotonic() - worker.started
        if worker.forked and worker not in self._old and worker.condemned not in (_OVERTAKEN, _ABANDONED):
            self.zygote.ended(worker.loaded, crash.signal is not None and not worker.condemned)
        # A start or reload that waits for the worker raises the reason itself. A start does without the worker if another one
        # has loaded the app and may be in use, but reports configuration errors.
        does_without = self._serves and not isinstance(worker.refusal, ConfigurationError)
        crashed = worker in self.workers and (worker.loading.done() or does_without)
        if worker.bare:
            self._bare_pauses.note(lived)
            if worker is self._bare:
                _log.error("%s", crash)
                self._bare = None
        for group in (self.workers, self._next, self._old):
            if worker in group:
                group.remove(worker)
        if HOOKS.registered and worker.number < self._count:
            HOOKS.emit(
                WorkerEnded(
                    number=worker.number,
                    pid=worker.pid,
                    seconds=lived,
                    crashed=crashed,
                    signal=crash.signal,
                    exit_code=crash.exit_code,
                )
            )
        if crashed:
            self.crashes += 1
            self._start_again(worker.number, crash, lived)
        self._on_lost(worker, crash)
        worker.settle(None if crashed else worker.refusal or crash)
        self._on_change()

    def _start_again(self, number: int, crash: WorkerCrashed, lived: float) -> None:
        """Restart an ended worker later, or one whose process was refused."""
        _log.error("%s", crash)
        self._count_crash(crash, lived)
        self._spawn(self._restart, number)

    def _count_crash(self, crash: WorkerCrashed, lived: float) -> None:
        now = time.monotonic()
        self._crashes.append(now)
        self._last = crash
        self._pauses.note(lived)
        if len(self._crashes) == _LIMIT and now - self._crashes[0] < _WINDOW:
            self._stopped_until = now + _WINDOW
            self._crashes.clear()
            _log.error("%d workers ended within %g s: no worker is started for the next %g s", _LIMIT, _WINDOW, _WINDOW)

    async def _restart(self, number: int) -> None:
        """Restart an ended worker after a pause, unless a reload begins first."""
        await anyio.sleep(max(self._pauses.pause, self._stopped_until - time.monotonic()))
        if number in {worker.number for worker in self.workers} or self._stopping:
            return
        self.restarts[number] += 1
        try:
            new = await self._new(number)
        except WorkerCrashed as crash:
            self._start_again(number, crash, 0.0)
            self._on_change()
            return
        new.settle()  # no start or reload waits for it
        if number in {worker.number for worker in self.workers}:  # a reload was faster
            new.kill(_OVERTAKEN)
        else:
            self.workers.append(new)

    async def reload(self) -> list[Worker]:
        """Start workers with the app's current code, switch to them when all are ready, and return them.

        A later reload cancels the loading of an earlier one, which may hang; the earlier one then has the outcome of the later.
        A worker may have ended again on return.

        :raises WorkerCrashed: if a worker fails to load the code; nothing has changed then.
        """
        if self._reload is not None:
            self._reload.cancel()
        self._reload = asyncio.create_task(self._load_next())
        self._reload.add_done_callback(mark_retrieved)
        while True:
            latest = self._reload
            try:
                return await asyncio.shield(latest)
            except asyncio.CancelledError:
                if latest is self._reload or not latest.cancelled():  # this caller was cancelled
                    raise

    async def _load_next(self) -> list[Worker]:
        """Replace the workers by new ones, and return these. On failure or cancellation the new ones are killed."""
        async with self._reloading:
            if self._stopping:
                raise ConfigurationError("the broker is stopping")
            mine: list[Worker] = []
            self._next = []
            try:
                for number in range(self._count):
                    mine.append(await self._new(number))
                    self._next.append(mine[-1])
                await _all_loaded(mine)
            except BaseException as error:
                later = isinstance(error, asyncio.CancelledError)
                for worker in mine:
                    worker.kill(_OVERTAKEN if later else _ABANDONED)
                raise
            self._old += self.workers
            self.workers, self._next = self._next, []
            self._crashes.clear()
            self._stopped_until, self._last = 0.0, None
            for worker in mine:
                if worker not in self.workers:  # it ended while the others loaded the app
                    self._spawn(self._restart, worker.number)
            return mine

    def retire_old(self) -> None:
        """End each replaced worker as soon as it is idle."""
        for worker in self._old:
            worker.retire()

    def stop(self) -> None:
        """End all workers."""
        self._stopping = True
        if self._reload is not None:
            self._reload.cancel()
        workers = self.all
        for worker in workers:
            worker.hang_up()
        until = time.monotonic() + _GRACE
        for worker in workers:
            worker.end(until)


def _resident_bytes(supervisor: Supervisor) -> Numbers:
    return {(str(worker.number),): resident_bytes(worker.pid) for worker in supervisor.workers}


def _runs(supervisor: Supervisor) -> Numbers:
    return {(str(worker.number),): len(worker.runs) for worker in supervisor.workers}


def _states(supervisor: Supervisor) -> Numbers:
    return Counter((worker.state,) for worker in supervisor.all if not worker.bare)


_STATES = ("starting", "ready", "draining")
#: The metrics of workers.
WORKERS: Sequence[Read[Supervisor]] = (
    Read("workers", "Worker processes, by state.", "gauge", _states, labels={"state": _STATES}),
    Read("worker_crashes", "Workers that ended without a request.", "counter", lambda workers: {(): workers.crashes}),
    Read(
        "worker_restarts",
        "Workers started in place of crashed ones.",
        "counter",
        lambda workers: {(): workers.restarts.total()},
    ),
    Read("worker_runs", "Runs of a worker.", "gauge", _runs, labels={"worker": ()}),
    Read("worker_resident_bytes", "Resident memory of a worker.", "gauge", _resident_bytes, labels={"worker": ()}),
)


async def _all_loaded(workers: list[Worker]) -> None:
    """Wait until all have loaded the app, or raise the first failure."""
    done, _ = await asyncio.wait([worker.loading for worker in workers], return_when=asyncio.FIRST_EXCEPTION)
    for one in done:
        one.result()


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Mark a future's error as retrieved: asyncio logs the others, also those whose caller has left."""
    if not future.cancelled():
        future.exception()
