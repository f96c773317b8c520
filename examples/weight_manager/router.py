"""Spreads requests over short-lived worker processes; it knows neither models nor torch.

A worker serves some requests, or lives for some time, and is replaced by another one. One that dies is replaced too, and its
request goes to another worker, first in line: an inference may be done twice. Where no worker lives and none can be started,
requests fail at once, with the reason, until one can.

Workers are forked from one process that has imported torch (multiprocessing's "forkserver"), so a new one is there in
milliseconds, with libraries that are in memory once.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import pkgutil
import random
import signal
import socket
from dataclasses import dataclass, field

import msgspec
from messages import Answer, Request, frame

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    ["torch", "msgspec", "rich.table", "rich.progress", "shared_rpc.client", "shared_rpc.codec.results"]
)


class RouterError(Exception):
    """A request was not answered."""


class Overloaded(RouterError):
    """The queue is full: come back later."""


class NoWorkers(RouterError):
    """All workers are dead, and none can be started."""


class RequestFailed(RouterError):
    """The model raised, or every worker that tried has died."""


class WorkerLost(Exception):
    """A worker has ended, or did not get ready. Its text says how."""


@dataclass(frozen=True)
class Limits:
    """A worker lives for about ``requests`` or ``seconds``. It has ``patience`` seconds for a request, and to get ready, and
    ``grace`` seconds to end.

    ``queue`` requests may wait, each is tried ``attempts`` times, and after ``starts`` workers in a row that did not get ready
    nobody waits any more.
    """

    requests: int = 1000
    seconds: float = 600.0
    patience: float = 60.0
    grace: float = 5.0
    queue: int = 64
    attempts: int = 3
    starts: int = 4


@dataclass
class Counts:
    started: int = 0
    retired: int = 0
    died: int = 0
    answered: int = 0
    retried: int = 0


@dataclass(order=True)
class Job:
    """A request that waits. Its number is its place in the queue, which it keeps when it is tried again."""

    number: int
    body: bytes = field(compare=False)
    answer: asyncio.Future[Answer] = field(compare=False)
    tried: int = field(default=0, compare=False)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():  # who asked may have gone
            self.answer.set_exception(error)


class Worker:
    """One process, and the router's end of its socket."""

    def __init__(self) -> None:
        self.pid = 0
        self.served = 0
        self.since = asyncio.get_running_loop().time()
        self.gone = asyncio.Event()

    async def start(self, main: str, args: tuple[object, ...], patience: float) -> None:
        """Return when it is ready.

        :raises WorkerLost: if it will not be.
        """
        try:
            ours, theirs = socket.socketpair()
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            with theirs:
                self._process = FORK.Process(target=_run, args=(main, theirs, *args), daemon=True)
                self._process.start()
        except OSError as error:
            raise WorkerLost(f"no process can be started: {error}") from error
        self.pid = self._process.pid or 0
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._ended)
        first = await self._answer(patience)
        if first.error:
            raise WorkerLost(first.error)

    async def ask(self, body: bytes, patience: float) -> Answer:
        """The answer to a request.

        :raises WorkerLost: if the worker dies of it, or takes too long, which it pays for with its life.
        """
        self._writer.write(body)
        answer = await self._answer(patience)
        self.served += 1
        return answer

    async def _answer(self, patience: float) -> Answer:
        try:
            async with asyncio.timeout(patience):
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                return msgspec.msgpack.decode(await self._reader.readexactly(size), type=Answer)
        except (TimeoutError, msgspec.DecodeError) as error:
            self._process.kill()
            why = f"did not answer for {patience:g} s" if isinstance(error, TimeoutError) else "sent what is no answer"
            raise WorkerLost(f"worker {self.pid} was killed, because it {why}") from error
        except (OSError, asyncio.IncompleteReadError):
            await self.gone.wait()
            raise WorkerLost(self.epitaph()) from None

    def epitaph(self) -> str:
        code = self._process.exitcode or 0
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return f"worker {self.pid} {how}"

    async def end(self, grace: float) -> None:
        """Hang up, which ends it, and wait until it has ended; one that takes longer is killed."""
        if not self.pid:
            return
        self._writer.close()
        try:
            async with asyncio.timeout(grace):
                await self.gone.wait()
        except TimeoutError:
            self._process.kill()
            await self.gone.wait()
        finally:
            if not self.gone.is_set():  # cancelled
                self._process.kill()

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self.gone.set()


class Router:
    """``async with Router(main, args, workers) as router: answer = await router.ask(request)``.

    :param main: what a worker runs, ``"module:function"``: it is called with a socket and the ``args``.
    """

    def __init__(self, main: str, args: tuple[object, ...], workers: int, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.counts = Counts()
        self.workers: set[Worker] = set()
        self._main, self._args, self._size = main, args, workers
        self._queue: asyncio.PriorityQueue[Job] = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._failures = 0
        self._down: str | None = None

    async def __aenter__(self) -> Router:
        # Or the first start would hold up the loop for so long.
        await asyncio.to_thread(warm)
        self._slots = [asyncio.create_task(self._slot()) for _ in range(self._size)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all workers. Who waits still is told so."""
        for slot in self._slots:
            slot.cancel()
        ends = await asyncio.gather(*self._slots, return_exceptions=True)
        self._fail_all("the router was closed")
        for end in ends:
            if isinstance(end, Exception):  # a defect of this file's
                raise end

    async def ask(self, request: Request) -> Answer:
        """The answer of some worker.

        :raises RouterError: see there.
        """
        if self._down is not None:
            raise NoWorkers(self._down)
        if self._queue.qsize() >= self.limits.queue:
            raise Overloaded(f"{self.limits.queue} requests wait already, for {len(self.workers)} workers")
        job = Job(next(self._numbers), frame(request), asyncio.get_running_loop().create_future())
        self._queue.put_nowait(job)
        answer = await job.answer
        if answer.error:
            raise RequestFailed(f"{request.model}: {answer.error}")
        self.counts.answered += 1
        return answer

    async def _slot(self) -> None:
        """A place for one worker, which has one after the other."""
        pause = 0.05
        while True:
            worker = Worker()
            try:
                await worker.start(self._main, self._args, self.limits.patience)
                self._failures, self._down, pause = 0, None, 0.05
                self.counts.started += 1
                self.workers.add(worker)
                await self._feed(worker)
                self.counts.retired += 1
            except WorkerLost as lost:
                if worker in self.workers:
                    self.counts.died += 1
                else:
                    self._not_started(lost)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 1.0)
            finally:
                self.workers.discard(worker)
                await worker.end(self.limits.grace)

    def _not_started(self, lost: WorkerLost) -> None:
        self._failures += 1
        if not self.workers and self._failures >= self.limits.starts:
            self._down = f"all workers are dead, and the last {self._failures} did not get ready: {lost}"
            self._fail_all(self._down)

    def _fail_all(self, why: str) -> None:
        while not self._queue.empty():
            self._queue.get_nowait().fail(NoWorkers(why))

    async def _feed(self, worker: Worker) -> None:
        """Give a worker requests for as long as it is to live.

        :raises WorkerLost: if it dies before.
        """
        share = random.uniform(0.75, 1.25)  # or those that begin together would all end together
        end, requests = worker.since + share * self.limits.seconds, share * self.limits.requests
        while worker.served < requests:
            job = await self._next(worker, end)
            if job is None:
                return
            if job.answer.done():  # nobody waits any more
                continue
            try:
                answer = await worker.ask(job.body, self.limits.patience)
            except WorkerLost as lost:
                job.tried += 1
                if job.tried < self.limits.attempts:
                    self.counts.retried += 1
                    self._queue.put_nowait(job)
                else:
                    job.fail(RequestFailed(f"{job.tried} workers have died of it, at last: {lost}"))
                raise
            except asyncio.CancelledError:
                job.fail(NoWorkers("the router was closed"))
                raise
            if not job.answer.done():
                job.answer.set_result(answer)

    async def _next(self, worker: Worker, end: float) -> Job | None:
        """The next request; None when the worker's time is up.

        :raises WorkerLost: if it dies meanwhile.
        """
        taking, going = asyncio.create_task(self._queue.get()), asyncio.create_task(worker.gone.wait())
        taken = False
        try:
            left = max(end - asyncio.get_running_loop().time(), 0)
            await asyncio.wait((taking, going), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if worker.gone.is_set():
                raise WorkerLost(worker.epitaph())
            taken = taking.done()
            return taking.result() if taken else None
        finally:
            going.cancel()
            if not taken and not taking.cancel():  # it came at the same moment
                self._queue.put_nowait(taking.result())


def warm() -> None:
    """Have the forkserver ready. It waits until torch is imported there."""
    process = FORK.Process(target=int)
    process.start()
    process.join()


def _run(main: str, *args: object) -> None:
    pkgutil.resolve_name(main)(*args)
