"""A server's life: it listens in a thread of its own, and ends within a second of being asked to."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib.util
import logging
import os
import resource
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel

from shared_rpc.errors import ConfigurationError, ConnectionClosed, ServerBusy
from shared_rpc.memory.devices import device_kind, device_tag
from shared_rpc.server.core import Core, Delivery, Waiter
from shared_rpc.server.executor import CHAIN, Failure, InProcessExecutor
from shared_rpc.server.listener import bind_socket, remove_socket
from shared_rpc.server.session import Connection, Sessions
from shared_rpc.settings import resolve_base_path, socket_path
from shared_rpc.transport import peer_of

if TYPE_CHECKING:
    from shared_rpc.provider import Provider

__all__ = ["Server", "wait_for_signal"]

T = TypeVar("T")

_log = logging.getLogger("shared_rpc.server")

#: Seconds that stop() gives the server's thread.
_STOP_TIMEOUT = 0.9
#: The session of calls that this process makes itself.
_LOCAL_SESSION = "local"


class Server:
    """Serves a provider's endpoints at a Unix socket, from a thread of its own.

    :param provider: whose endpoints to serve; those shared later are served too.
    :param socket_path: where to listen; by default what the provider's base path and device give.
    :param max_workers: threads that run endpoints.
    :param max_bytes: memory budget in bytes for objects nobody holds, see :class:`~shared_rpc.store.objects.ObjectStore`.
    :param max_connections: connections beyond this are turned away with :class:`ServerBusy`.
    :param allow_uids: users beside this process's own whose clients are let in. They can write to what is shared with
        ``access="read_write"``, and the socket's mode and directory must let them through as well.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        socket_path: str | os.PathLike[str] | None = None,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        max_connections: int = 8192,
        allow_uids: Collection[int] = (),
    ) -> None:
        self._provider = provider
        self._asked_path = socket_path
        self._max_workers = max_workers if max_workers is not None else min(32, (os.cpu_count() or 1) + 4)
        self._max_bytes = max_bytes
        self._max_connections = max_connections
        self._uids = {os.geteuid(), *allow_uids}
        self._running: _Running | None = None

    @property
    def socket_path(self) -> str:
        """Where the server listens, or will."""
        if self._asked_path is not None:
            return os.path.abspath(self._asked_path)
        return socket_path(resolve_base_path(self._provider.base_path), device_tag(self._provider.device_id))

    @property
    def running(self) -> bool:
        """Whether it serves."""
        return self._running is not None and self._running.thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether a thread still runs an endpoint, perhaps after :meth:`stop`."""
        return self._running is not None and self._running.executor.busy > 0

    def start(self, blocking: bool = False) -> Server:
        """Listen. With ``blocking``, return only after SIGINT or SIGTERM, when the server was stopped.

        Raises this process's soft limit of open files to the hard one: every client and every segment needs some.

        :raises ConfigurationError: if the socket cannot be had; a live server's pid is named.
        """
        if self.running:
            raise ConfigurationError(f"this server already runs at {self.socket_path}")
        if blocking:
            try:
                wait_for_signal(self.start)
            finally:
                self.stop()
            return self
        device = self._provider.device_id
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        path = self.socket_path
        executor = InProcessExecutor(self._provider.endpoints, device_kind(device), self._max_workers)
        core = Core(self._provider.registry, executor, device, max_bytes=self._max_bytes)
        listener = bind_socket(path)
        self._running = _Running(core, executor, listener, path, self._uids, self._max_connections)
        self._running.start()
        self._provider.serve_with(self)
        _log.info("serving on %s", path)
        return self

    def stop(self) -> None:
        """Stop within a second: waiters get :class:`ConnectionClosed`, the socket goes, clients keep their memory."""
        running = self._running
        if running is not None:
            running.stop()

    def call(
        self, endpoint: str, lowered: tuple[list[Any], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> concurrent.futures.Future[Delivery]:
        """A call of this process's own: through the cache, and with the live value for a result."""
        running = self._need_running()
        future: concurrent.futures.Future[Delivery] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a caller that goes away does not keep the lease from being given back
        waiter = Waiter(_LOCAL_SESSION, functools.partial(_settle, future), local=True)
        chain = CHAIN.get()
        running.post(lambda: running.core.call(waiter, endpoint, lowered, (args, kwargs), chain))
        return future

    def ask(self, question: Callable[[Core], T]) -> T:
        """``question(core)``, evaluated on the server's loop."""
        running = self._need_running()
        if running.here():
            return question(running.core)
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def answer() -> None:
            try:
                future.set_result(question(running.core))
            except Exception as error:
                future.set_exception(error)

        running.post(answer)
        return future.result()

    def release(self, object_id: str) -> None:
        """Give back a lease of this process's own calls; without a wait, and without an error if the server is gone."""
        running = self._running
        if running is not None and running.pid == os.getpid():
            with suppress(ConnectionClosed):  # every lease went with the server
                running.post(lambda: running.core.release(_LOCAL_SESSION, [object_id]))

    def on_loop(self) -> bool:
        """Whether the caller is on the server's loop, where it must not wait."""
        return self._running is not None and self._running.here()

    def lend_thread(self) -> AbstractContextManager[None]:
        """See :meth:`InProcessExecutor.lend_thread`."""
        return self._need_running().executor.lend_thread()

    def info(self) -> dict[str, Any]:
        """What ``get_server_info`` tells."""
        facts = self._need_running().facts
        return self.ask(lambda _: facts())

    def _need_running(self) -> _Running:
        if self._running is None or not self.running:
            raise ConnectionClosed(f"the server of this process at {self.socket_path} does not run")
        return self._running

    def __enter__(self) -> Server:
        if not self.running:
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()


def _settle(future: concurrent.futures.Future[Delivery], outcome: Delivery | Failure) -> None:
    if isinstance(outcome, Failure):
        assert outcome.error is not None, "a failure in this process has its exception"
        future.set_exception(outcome.error)
    else:
        future.set_result(outcome)


class _Running:
    """One run of a server: its thread, loop, socket and connections."""

    def __init__(
        self,
        core: Core,
        executor: InProcessExecutor,
        listener: socket.socket,
        path: str,
        uids: Collection[int],
        max_connections: int,
    ) -> None:
        self.pid = os.getpid()
        self.core = core
        self.executor = executor
        self.loop: asyncio.AbstractEventLoop
        self.thread = threading.Thread(target=self._serve, name="shared-rpc-server", daemon=True)
        self._listener = listener
        self._path = path
        self._inode = os.lstat(path).st_ino
        self._uids = uids
        self._max_connections = max_connections
        self._sessions = Sessions(core)
        self._connections: set[Connection] = set()
        self._scope: anyio.CancelScope
        self._posted: deque[Callable[[], object]] = deque()
        self._posting = threading.Lock()
        self._ended = False
        self._removing = threading.Lock()
        self._removed = False
        self._mail: asyncio.Event
        self._ready = threading.Event()
        self._started = time.monotonic()
        _in_this_process.add(self)

    def start(self) -> None:
        self.thread.start()
        self._ready.wait()
        if not self.thread.is_alive():
            raise ConfigurationError(f"the server at {self._path} could not start; the log of shared_rpc.server says why")

    def here(self) -> bool:
        return threading.current_thread() is self.thread

    def post(self, job: Callable[[], object]) -> None:
        """Have the loop run ``job``, which must not raise; from any thread. One that was taken is run, come what may.

        :raises ConnectionClosed: if the loop has ended.
        """
        with self._posting:
            if self._ended:
                raise ConnectionClosed(f"the server of this process at {self._path} was stopped")
            self._posted.append(job)
        with suppress(RuntimeError):  # the loop was closed just now: what it left is run after it
            self.loop.call_soon_threadsafe(self._mail.set)

    async def _answer_posts(self) -> None:
        while True:
            await self._mail.wait()
            self._mail.clear()
            self._run_posted()

    def _run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def stop(self) -> None:
        if self.pid != os.getpid():
            return
        self._remove_socket()
        with suppress(ConnectionClosed):
            self.post(self._scope.cancel)
        if not self.here():
            self.thread.join(_STOP_TIMEOUT)
        self.executor.close()

    def _remove_socket(self) -> None:
        # Once, and while it still listens: the next server's socket may get the same path and the same inode number.
        with self._removing:
            if not self._removed:
                self._removed = True
                remove_socket(self._path, self._inode)

    def facts(self) -> dict[str, Any]:
        return self.core.info() | {
            "socket_path": self._path,
            "uptime": time.monotonic() - self._started,
            "sessions": len(self._sessions),
            "connections": len(self._connections),
            "ready": True,
        }

    def _serve(self) -> None:
        fast = importlib.util.find_spec("uvloop") is not None
        try:
            anyio.run(self._main, backend="asyncio", backend_options={"use_uvloop": fast})
        except BaseException:
            _log.exception("the server at %s failed", self._path)
        finally:
            with self._posting:
                self._ended = True
            self._run_posted()
            self._ready.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._mail = asyncio.Event()
        with self._listener, anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as tasks:
                running = anyio.Event()
                tasks.start_soon(functools.partial(self.core.run, started=running))
                await running.wait()
                tasks.start_soon(self._answer_posts)
                self._ready.set()
                try:
                    await self._accept(tasks)
                finally:
                    # Before the connections close, so that those who wait are told why.
                    self.core.stop()

    async def _accept(self, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            # However many connect, those who are connected have their turn.
            await anyio.lowlevel.checkpoint()
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(self._listener)
                continue
            except OSError as error:
                # Out of descriptors, or the client went away at once: neither must end the server.
                _log.error("cannot accept a connection: %s", error)
                await anyio.sleep(0.05)
                continue
            sock.setblocking(False)
            peer = peer_of(sock)
            connection = Connection(sock, peer, self.core, self._sessions, self.facts, tasks)
            if peer.uid not in self._uids:
                _log.warning("turned away pid %d of uid %d", peer.pid, peer.uid)
                connection.refuse(ConfigurationError(f"the server admits no client of uid {peer.uid} (allow_uids)"))
                continue
            if len(self._connections) >= self._max_connections:
                connection.refuse(ServerBusy(f"the server has its {self._max_connections} connections (max_connections)"))
                continue
            self._connections.add(connection)
            tasks.start_soon(self._attend, connection)

    async def _attend(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    def abandon(self) -> None:
        """In a forked child: let go of the descriptors that are the parent's."""
        self._listener.close()
        for connection in self._connections:
            connection.abandon()
        for stored in self.core.objects:
            stored.record.close()


_in_this_process: weakref.WeakSet[_Running] = weakref.WeakSet()


def _after_fork() -> None:
    # A child that kept the listening socket would make a dead server look alive.
    for running in list(_in_this_process):
        running.abandon()
    _in_this_process.clear()


os.register_at_fork(after_in_child=_after_fork)


def wait_for_signal(begin: Callable[[], object]) -> None:
    """Return when this process gets SIGINT or SIGTERM. In the main thread only.

    :param begin: called first, when a signal ends the wait and no longer the process: what it starts can be stopped from
        its first moment on. If it returns None, there is nothing to wait for.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("start(blocking=True) waits for signals, so it must be called in the main thread")
    asked = threading.Event()
    with _handlers({number: lambda *_: asked.set() for number in (signal.SIGINT, signal.SIGTERM)}):
        if begin() is None:
            return
        # An untimed wait may hold back the handler on some systems; the period costs nothing.
        while not asked.wait(3600):
            continue


@contextmanager
def _handlers(handlers: Mapping[int, Any]) -> Iterator[None]:
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
