"""A core on an event loop in its own thread: the base of a server, and of the local role."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import anyio

from shared_rpc.errors import ConfigurationError, ConnectionClosed
from shared_rpc.execution.coroutines import run_loop
from shared_rpc.execution.in_process import InProcessExecutor
from shared_rpc.forks import after_fork, fork_safe_lock
from shared_rpc.memory.closing import CLOSER
from shared_rpc.server.core import Core

T = TypeVar("T")

_log = logging.getLogger("shared_rpc.server")

#: Maximum seconds that stop() waits for the thread.
_STOP_TIMEOUT = 0.9


class Engine:
    """Runs a core until it is stopped, once. Thread-safe.

    :param name: its name in errors: ``"the server at /run/…"``.
    :param work: runs on the loop together with the core; the engine ends when it returns or fails.
    """

    def __init__(
        self,
        core: Core,
        executor: InProcessExecutor,
        name: str,
        work: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.core = core
        self.pid = os.getpid()
        self.executor = executor
        self._name = name
        self._work = work
        self._thread = threading.Thread(target=self._run, name="shared-rpc-server", daemon=True)
        self.loop: asyncio.AbstractEventLoop
        self._scope: anyio.CancelScope
        #: The context of jobs: the posting thread's may be an endpoint's.
        self._context: contextvars.Context
        self._posted: deque[Callable[[], object]] = deque()
        self._posting = fork_safe_lock()
        self._ended = False
        self._ready = threading.Event()
        after_fork(self._abandon)

    def start(self) -> None:
        """Start, and return once calls are accepted.

        :raises ConfigurationError: if the start fails.
        """
        self._thread.start()
        self._ready.wait()
        if self._ended:
            raise ConfigurationError(f"{self._name} did not start: see the log of shared_rpc.server")

    @property
    def running(self) -> bool:
        """True while it accepts calls, in this process."""
        return self.pid == os.getpid() and self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """True while a thread of this process runs an endpoint, perhaps after :meth:`stop`."""
        return self.pid == os.getpid() and self.executor.busy > 0

    def here(self) -> bool:
        """Return True if the caller is on the engine's loop, where waiting for the engine would deadlock."""
        return threading.current_thread() is self._thread

    def post(self, job: Callable[[], object]) -> None:
        """Run ``job``, which must not raise, on the loop; from any thread. An accepted job is always run.

        :raises ConnectionClosed: if the engine was stopped, or is the parent process's.
        """
        with self._posting:
            if self._ended:
                raise ConnectionClosed(f"{self._name} was stopped")
            self._posted.append(job)
        with suppress(RuntimeError):  # the loop has just closed: remaining jobs run after it
            self.loop.call_soon_threadsafe(self._run_posted, context=self._context)

    def ask(self, question: Callable[[Core], T]) -> T:
        """Evaluate ``question(core)`` on the loop, and return the answer."""
        if self.here():
            return question(self.core)
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def answer() -> None:
            try:
                future.set_result(question(self.core))
            except Exception as error:
                future.set_exception(error)

        self.post(answer)
        return future.result()

    def stop(self) -> None:
        """End within a second: waiters get :class:`ConnectionClosed`. Threads that run an endpoint are not joined."""
        if self.pid != os.getpid():
            return
        with suppress(ConnectionClosed):
            self.post(self._scope.cancel)
        if not self.here():
            self._thread.join(_STOP_TIMEOUT)

    def _run(self) -> None:
        with CLOSER.spare_this_thread():
            try:
                run_loop(self._main)
            except BaseException:
                _log.exception("%s failed", self._name)
            finally:
                with self._posting:
                    self._ended = True
                self._run_posted()
                self.executor.close()
                self.core.close()
                self._ready.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as tasks:
                running = anyio.Event()
                tasks.start_soon(functools.partial(self.core.run, started=running))
                await running.wait()
                self._ready.set()
                await (anyio.sleep_forever() if self._work is None else self._work())
        await self.executor.finish()

    def _run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _abandon(self) -> None:
        """Release the parent's objects in a forked child, which has no loop thread and only copies of the descriptors."""
        self._ended = True
        for stored in self.core.objects:
            stored.close()
