"""A core on an event loop of its own thread: what a server is made of, and the local role too."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib.util
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import anyio

from shared_rpc.context import CURRENT_RUN
from shared_rpc.errors import ConfigurationError, ConnectionClosed
from shared_rpc.protocol.tasks import TaskInfo
from shared_rpc.server.buffers import Buffers
from shared_rpc.server.core import Core
from shared_rpc.server.executor import Executor
from shared_rpc.server.outcomes import Failure
from shared_rpc.server.runs import Delivery, Waiter
from shared_rpc.server.tasks import Tasks

__all__ = ["LOCAL_SESSION", "Engine", "PendingCall"]

T = TypeVar("T")

_log = logging.getLogger("shared_rpc.server")

#: Where it is installed.
USES_UVLOOP = importlib.util.find_spec("uvloop") is not None
#: Seconds that stop() gives the thread.
_STOP_TIMEOUT = 0.9
#: The session of calls that this process makes itself.
LOCAL_SESSION = "local"


class Engine:
    """Runs a core until it is stopped, once. Safe to use from any thread.

    :param name: what errors call it: ``"the server at /run/…"``.
    :param work: what runs on the loop beside the core; when it returns or fails, the engine ends.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        name: str,
        work: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.core = core
        self.pid = os.getpid()
        self._executor = executor
        self._name = name
        self._work = work
        self._thread = threading.Thread(target=self._run, name="shared-rpc-server", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._scope: anyio.CancelScope
        self._mail: anyio.Event
        self._posted: deque[Callable[[], object]] = deque()
        self._posting = threading.Lock()
        self._ended = False
        self._ready = threading.Event()
        _engines.add(self)

    def start(self) -> None:
        """Return when calls are taken.

        :raises ConfigurationError: if that never comes.
        """
        self._thread.start()
        self._ready.wait()
        if self._ended:
            raise ConfigurationError(f"{self._name} could not start; the log of shared_rpc.server says why")

    @property
    def running(self) -> bool:
        """Whether it takes calls, in this process."""
        return self.pid == os.getpid() and self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether a thread of this process still runs an endpoint, perhaps after :meth:`stop`."""
        return self.pid == os.getpid() and self._executor.busy > 0

    def here(self) -> bool:
        """Whether the caller is on the engine's loop, where it must not wait for it."""
        return threading.current_thread() is self._thread

    def lend_thread(self) -> AbstractContextManager[None]:
        """See :meth:`Executor.lend_thread`."""
        return self._executor.lend_thread()

    def post(self, job: Callable[[], object]) -> None:
        """Have the loop run ``job``, which must not raise; from any thread. One that was taken is run, come what may.

        :raises ConnectionClosed: if the engine was stopped, or is the parent process's.
        """
        with self._posting:
            if self._ended:
                raise ConnectionClosed(f"{self._name} was stopped")
            self._posted.append(job)
        with suppress(RuntimeError):  # the loop was closed just now: what it left is run after it
            self._loop.call_soon_threadsafe(self._wake)

    def ask(self, question: Callable[[Core], T]) -> T:
        """``question(core)``, evaluated on the loop."""
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

    def call(
        self, endpoint: str, lowered: tuple[list[Any], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PendingCall:
        """A call of this process's own: through the cache, and with the live value for a result."""
        pending = PendingCall(self)
        run = CURRENT_RUN.get()
        chain = run.chain if run is not None else frozenset()
        self.post(lambda: self.core.call(pending.waiter, endpoint, lowered, (args, kwargs), chain))
        return pending

    def submit(
        self, endpoint: str, lowered: tuple[list[Any], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TaskInfo:
        """A task of this process's own; see :meth:`call`."""
        return self.ask(lambda core: core.submit(endpoint, lowered, (args, kwargs)))

    def await_task(
        self, begin: Callable[[Tasks, Waiter], None], on_event: Callable[[TaskInfo], None] | None = None
    ) -> PendingCall:
        """Wait for a task as ``begin`` says, or fetch its result.

        :param on_event: is called on the loop; the wait is then one that looks, and claims the result.
        """
        pending = PendingCall(self, on_event, looks=on_event is not None)
        self.ask(lambda core: begin(core.tasks, pending.waiter))
        return pending

    def await_buffer(self, begin: Callable[[Buffers, Waiter], None]) -> PendingCall:
        """Wait for what ``begin`` asks of buffers or devices."""
        pending = PendingCall(self)
        self.ask(lambda core: begin(core.buffers, pending.waiter))
        return pending

    def release(self, object_id: str) -> None:
        """Give back a lease of this process's own calls; without a wait, and without an error if the engine is gone."""
        with suppress(ConnectionClosed):  # every lease went with it
            self.post(lambda: self.core.release(LOCAL_SESSION, [object_id]))

    def stop(self) -> None:
        """End within a second: waiters get :class:`ConnectionClosed`. Threads that run an endpoint are not waited for."""
        if self.pid != os.getpid():
            return
        with suppress(ConnectionClosed):
            self.post(self._scope.cancel)
        if not self.here():
            self._thread.join(_STOP_TIMEOUT)

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio", backend_options={"use_uvloop": USES_UVLOOP})
        except BaseException:
            _log.exception("%s failed", self._name)
        finally:
            with self._posting:
                self._ended = True
            self._run_posted()
            self._executor.close()
            self.core.close()
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._mail = anyio.Event()
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as tasks:
                running = anyio.Event()
                tasks.start_soon(functools.partial(self.core.run, started=running))
                await running.wait()
                tasks.start_soon(self._answer_posts)
                self._ready.set()
                await (anyio.sleep_forever() if self._work is None else self._work())
        await self._executor.finish()

    def _wake(self) -> None:
        self._mail.set()

    async def _answer_posts(self) -> None:
        while True:
            await self._mail.wait()
            self._mail = anyio.Event()
            self._run_posted()

    def _run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _abandon(self) -> None:
        """In a forked child: the loop's thread is not here, and its descriptors are the parent's."""
        self._posting = threading.Lock()
        self._ended = True
        for stored in self.core.objects:
            stored.close()


class PendingCall:
    """A call of this process's own, or its wait for a task, until it is answered or given up.

    :param looks: see :class:`Waiter`; it claims the result as well.
    """

    def __init__(self, engine: Engine, on_event: Callable[[TaskInfo], None] | None = None, *, looks: bool = False) -> None:
        self.future: concurrent.futures.Future[Delivery] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()  # whoever waits for it with asyncio must not cancel it
        # Not a method of this object: it would be in a cycle, and the result with it.
        self.waiter = Waiter(
            LOCAL_SESSION,
            functools.partial(_settle, self.future),
            local=True,
            on_event=on_event,
            looks=looks,
            claims=looks,
        )
        self._engine = engine

    def give_up(self) -> None:
        """Nobody waits any more: work that has not begun is dropped, and a lease that was granted goes back."""
        with suppress(ConnectionClosed):
            self._engine.post(self._leave)

    def withdraw(self) -> bool:
        """Stop waiting, with nothing lost: False if the outcome is there after all."""

        def leave(core: Core) -> bool:
            if self.future.done():
                return False
            core.leave(self.waiter)
            return True

        return self._engine.ask(leave)

    def _leave(self) -> None:
        if not self.future.done():
            self._engine.core.leave(self.waiter)
            self.future.set_exception(concurrent.futures.CancelledError())  # a thread that waits for it must end
        elif self.future.exception() is None:
            delivery = self.future.result()
            if (delivery.managed or self.waiter.claims) and delivery.stored is not None:
                self._engine.core.release(LOCAL_SESSION, [delivery.stored.object_id])


def _settle(future: concurrent.futures.Future[Delivery], outcome: Delivery | Failure) -> None:
    if isinstance(outcome, Failure):
        future.set_exception(outcome.to_raise())
    else:
        future.set_result(outcome)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine._abandon()
    _engines.clear()


os.register_at_fork(after_in_child=_after_fork)
