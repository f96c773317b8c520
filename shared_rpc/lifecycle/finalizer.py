"""Threads for work that must not run in finalisers or in latency-critical threads.

A finaliser can run between any two instructions of any thread, so it must not lock, use a socket or wait for a GPU. It submits
a job instead, which runs here.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shared_rpc.forks import after_fork

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("shared_rpc")

Job = Callable[[], object]


def weakly(method: Callable[P, T]) -> Callable[P, T | None]:
    """Call a bound method through a weak reference to its object: after the object is collected, the call does nothing.

    Parts of an object, threads and finalisers must not hold a strong reference to it: it must end with its last user instead of
    with the next pass of the cyclic collector.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        found = reference()
        return found(*args, **kwargs) if found is not None else None

    return call


class FinalizerThread:
    """A queue of jobs and one daemon thread, started with the first :meth:`start`. A forked child has neither.

    :param name: the name of the thread.
    """

    def __init__(self, name: str = "shared-rpc-finalizer") -> None:
        self._name = name
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        # SimpleQueue.put is reentrant: the standard library documents it for use in finalisers.
        self._jobs: queue.SimpleQueue[tuple[float, int, Job]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._starting = threading.Lock()
        #: True while the thread is running.
        self.started = False

    def start(self) -> None:
        """Start the thread unless it runs; call it before registering a finaliser that submits."""
        if not self.started:
            with self._starting:
                if not self.started:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                    self.started = True

    def submit(self, job: Job, after: float = 0.0) -> None:
        """Queue a job, to be run ``after`` so many seconds. Safe in a finaliser."""
        self._jobs.put((time.monotonic() + after if after else 0.0, next(self._numbers), job))

    def _run(self) -> None:
        later: list[tuple[float, int, Job]] = []
        while True:
            left = later[0][0] - time.monotonic() if later else None
            try:
                job = heapq.heappop(later) if left is not None and left <= 0 else self._jobs.get(timeout=left)
            except queue.Empty:
                continue
            if job[0] > time.monotonic():
                heapq.heappush(later, job)
            else:
                self._do(job[2])
            # An idle thread must not keep the objects of its last job.
            del job

    @staticmethod
    def _do(job: Job) -> None:
        try:
            job()
        except Exception:
            _log.exception("a clean-up job of the finaliser thread failed")


FINALIZER = FinalizerThread()
