"""Worker threads that do not hold up the end of the process.

The threads of anyio and of ``concurrent.futures`` are joined when the interpreter exits, so a model that still loads
would keep a stopped server alive for minutes. These are daemons.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from shared_rpc.errors import ConfigurationError

__all__ = ["WorkerThreads"]

T = TypeVar("T")

_log = logging.getLogger("shared_rpc.server")

_Job = Callable[[], None]


class WorkerThreads:
    """At most ``limit`` threads that run jobs for an asyncio loop; started as needed and kept for the next job.

    :param prepare: what a new thread does first.
    """

    def __init__(self, limit: int, prepare: Callable[[], None]) -> None:
        if limit < 1:
            raise ConfigurationError(f"max_workers={limit}: a server needs at least one thread to run endpoints")
        self._prepare = prepare
        self._limit = limit
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = 0
        #: Threads with a job. The limiter counts too, but belongs to the loop, and a job may end after that.
        self._working: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limiter: anyio.CapacityLimiter | None = None

    @property
    def busy(self) -> int:
        """Jobs that run now."""
        return len(self._working)

    async def run(self, work: Callable[[], T], begun: Callable[[], None]) -> T:
        """Run ``work``, which must not raise, in a thread; ``begun`` is called when it has one.

        If the caller is cancelled, a job that has begun goes on and its result is dropped.
        """
        if self._limiter is None:
            # Not before: a server may be made in a coroutine of another loop, and of trio.
            self._loop, self._limiter = asyncio.get_running_loop(), anyio.CapacityLimiter(self._limit)
        loop, limiter, job = asyncio.get_running_loop(), self._limiter, object()
        await limiter.acquire_on_behalf_of(job)
        begun()
        future: asyncio.Future[T] = loop.create_future()

        def done(result: T) -> None:
            limiter.release_on_behalf_of(job)
            if future.cancelled():
                _discard(result)
            else:
                future.set_result(result)

        def task() -> None:
            result = work()
            try:
                loop.call_soon_threadsafe(done, result)
            except RuntimeError:  # the loop is closed: the server stopped while the job ran
                _discard(result)

        if limiter.borrowed_tokens > self._threads:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"shared-rpc-worker-{self._threads}", daemon=True).start()
        self._jobs.put(task)
        return await future

    def _serve(self) -> None:
        try:
            self._prepare()
        except Exception:  # the endpoint will meet it again, and can tell its caller
            _log.exception("a worker thread could not be prepared")
        while (job := self._jobs.get()) is not None:
            self._working.add(threading.get_ident())
            job()
            self._working.discard(threading.get_ident())
            # The closure holds the arguments and the result; an idle thread must hold neither.
            del job

    @contextmanager
    def lend(self) -> Iterator[None]:
        """One thread more while the block runs; entered in a worker thread that only waits."""
        loop = self._loop
        if loop is None:
            yield
            return
        loop.call_soon_threadsafe(self._grow, 1)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self._grow, -1)

    def _grow(self, by: int) -> None:
        if self._limiter is not None:
            self._limiter.total_tokens += by

    def close(self) -> None:
        """Let idle threads end."""
        for _ in range(self._threads):
            self._jobs.put(None)


def _discard(result: object) -> None:
    record = getattr(result, "record", None)
    if record is not None:
        record.close()
