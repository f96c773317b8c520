"""Worker threads that do not delay the end of the process.

The threads of anyio and of ``concurrent.futures`` are joined when the interpreter exits, so a model still loading
would keep a stopped server alive for minutes. These are daemons.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from shared_rpc.errors import ConfigurationError

T = TypeVar("T")

_log = logging.getLogger("shared_rpc.server")


def _close_record(result: object) -> None:
    record = getattr(result, "record", None)
    if record is not None:
        record.close()


class Job(msgspec.Struct, eq=False):
    """A job for a thread; none of its functions may raise.

    ``begun`` is called on the loop when the job gets a thread, and ``done`` with the result of ``work``; ``after`` is called in
    the thread once the loop was notified. ``unused`` takes the result of ``work`` if the loop has ended.
    """

    work: Callable[[], Any]
    done: Callable[[Any], None]
    begun: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    unused: Callable[[Any], object] = _close_record


class WorkerThreads:
    """At most ``limit`` threads that run jobs for an asyncio loop, started on demand and reused.

    Methods other than :meth:`lend` and :attr:`busy` must be called in that loop's thread.

    :param prepare: called first in each new thread.
    :param next_turn: submit jobs in the loop's next turn, so that a client is answered before its job's thread uses the CPU.
    """

    def __init__(self, limit: int, prepare: Callable[[], None] | None = None, *, next_turn: bool = False) -> None:
        if limit < 1:
            raise ConfigurationError(f"max_workers={limit}: use at least one thread to run endpoints")
        self._prepare = prepare
        self._limit = limit
        self._next_turn = next_turn
        #: Number of jobs in threads.
        self._begun = 0
        self._waiting: deque[Job] = deque()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = 0
        #: Threads with a job, which may outlive the loop.
        self._working: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Finished jobs and their results, until the loop processes them.
        self._results: deque[tuple[Job, Any]] = deque()
        self._closed = False

    @property
    def busy(self) -> int:
        """The number of running jobs."""
        return len(self._working)

    def start(self, job: Job) -> None:
        """Run a job once a thread is free, perhaps before this returns.

        :raises RuntimeError: if there is no thread, and none can be started.
        """
        self._loop = asyncio.get_running_loop()
        self._waiting.append(job)
        try:
            if self._begun < self._limit:
                self._begin()
        except RuntimeError:
            self.withdraw(job)
            raise

    async def run(
        self,
        work: Callable[[], T],
        unused: Callable[[T], object] = lambda result: None,
        skipped: Callable[[], None] = lambda: None,
    ) -> T:
        """Run ``work`` in a thread; return its result, or raise its error. Cancellation does not stop the thread.

        :param unused: called with a result that no longer has a taker, in any thread.
        :param skipped: called if the work does not begin.
        :raises RuntimeError: like :meth:`start`.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def attempt() -> tuple[T, None] | tuple[None, BaseException]:
            try:
                return work(), None
            except BaseException as error:
                return None, error

        def discard(outcome: tuple[Any, BaseException | None]) -> None:
            if outcome[1] is None:
                unused(outcome[0])

        def done(outcome: tuple[Any, BaseException | None]) -> None:
            if future.done():
                discard(outcome)
            elif outcome[1] is not None:
                future.set_exception(outcome[1])
            else:
                future.set_result(outcome[0])

        job = Job(attempt, done, unused=discard)
        try:
            self.start(job)
        except RuntimeError:
            skipped()
            raise
        try:
            return await future
        except asyncio.CancelledError:
            if self.withdraw(job):
                skipped()
            elif not future.cancelled() and future.exception() is None:  # it ended in the same turn of the loop
                unused(future.result())
            raise

    def withdraw(self, job: Job) -> bool:
        """Drop a job that has not begun; return False if it has."""
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        return True

    def _begin(self) -> None:
        while self._waiting and self._begun < self._limit and (self._begun < self._threads or self._add_thread()):
            job = self._waiting.popleft()
            self._begun += 1
            if job.begun is not None:
                job.begun()
            if self._next_turn and self._loop is not None:
                self._loop.call_soon(self._jobs.put, job)
            else:
                self._jobs.put(job)

    def _add_thread(self) -> bool:
        """Start a thread; return False if none can be started, so that jobs must wait for the existing ones."""
        try:
            threading.Thread(target=self._serve, name=f"shared-rpc-worker-{self._threads + 1}", daemon=True).start()
        except RuntimeError as error:
            if not self._threads:
                raise
            _log.warning("jobs wait for %d threads: %s", self._threads, error)
            return False
        self._threads += 1
        return True

    def _take_result(self) -> None:
        job, result = self._results.popleft()
        self._begun -= 1
        try:
            job.done(result)
        except Exception:
            _log.exception("the result of work in a thread could not be handled")
        if self._waiting:
            self._begin()

    def _serve(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
        except Exception:  # the endpoint meets the same error, and its caller gets it
            _log.exception("preparing a worker thread failed")
        while (job := self._jobs.get()) is not None:
            self._working.add(threading.get_ident())
            self._results.append((job, job.work()))
            after = job.after
            # An idle thread must hold neither the arguments nor the result.
            del job
            self._working.discard(threading.get_ident())
            assert self._loop is not None, "jobs come from a loop"
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._take_result)
            if after is not None:
                after()
            del after
            if self._closed:
                self._discard_results()

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Allow one more thread while the block runs; entered in a worker thread that only waits."""
        loop = self._loop
        if loop is None:
            yield
            return
        with suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(self._grow, 1)
        try:
            yield
        finally:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._grow, -1)

    def _grow(self, by: int) -> None:
        self._limit += by
        self._begin()

    def close(self) -> None:
        """End idle threads, and from now on drop results: the loop has ended."""
        self._closed = True
        self._discard_results()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _discard_results(self) -> None:
        with suppress(IndexError):  # another thread may have done the same
            while True:
                job, result = self._results.popleft()
                job.unused(result)
