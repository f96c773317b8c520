"""The broker: sockets, sessions, objects and tasks in this process, endpoints in workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from shared_rpc.broker.dispatch import WorkerExecutor
from shared_rpc.broker.fd_store import FdStore
from shared_rpc.broker.memory import RelayedMemory
from shared_rpc.broker.supervisor import WORKERS, Spawner, Supervisor, mark_retrieved
from shared_rpc.broker.systemd import Inherited
from shared_rpc.broker.worker import Worker, WorkerCommand
from shared_rpc.errors import ConfigurationError, ConnectionClosed, ServerBusy, SharedRPCError, WorkerCrashed
from shared_rpc.execution.coroutines import run_loop
from shared_rpc.execution.endpoints import Registry
from shared_rpc.memory.closing import CLOSER
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.observability.metrics import Reading
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.infos import ReloadedServiceInfo, ReloadInfo, StopInfo
from shared_rpc.server.acceptor import Acceptor, Usage
from shared_rpc.server.core import Core
from shared_rpc.server.measures import measures
from shared_rpc.server.state.descriptors import Descriptors
from shared_rpc.server.state.objects import usage_of

if TYPE_CHECKING:
    from shared_rpc.observability.exporter import Exporter

_log = logging.getLogger("shared_rpc.broker")

#: Maximum seconds that :meth:`Broker.stop` waits for the thread.
_STOP_TIMEOUT = 3.0
#: Maximum and minimum seconds between two checks for use.
_LONGEST, _SHORTEST = 30.0, 0.02


@dataclass
class Service:
    """A served provider of the app. ``facts`` is the first worker's message about it."""

    facts: w.Serve
    core: Core
    acceptor: Acceptor
    executor: WorkerExecutor
    #: Cancels this service alone, once it has begun.
    scope: anyio.CancelScope | None = None
    #: True if an earlier broker stored this service, and no worker has loaded the app yet.
    recovered: bool = False


class Broker:
    """A server of an app's providers, in its own thread, with the endpoints in worker processes.

    :param on_end: called in its thread with the reason when it ends because it is idle, has failed, or a client stopped it.
    :param inherited: descriptors passed by a service manager; see :class:`shared_rpc.broker.systemd.Inherited`.
    :param exporter: serves metrics, None for no metrics; it is closed at the end.
    :param spill: the directory for objects evicted to files, None for no files.
    """

    def __init__(
        self,
        command: WorkerCommand,
        *,
        on_end: Callable[[str], None] = lambda why: None,
        inherited: Inherited | None = None,
        exporter: Exporter | None = None,
        spill: SpillDirectory | None = None,
    ) -> None:
        self._command = command
        self._options = command.options
        self._descriptors = Descriptors(closing=CLOSER.__len__)
        self._spill = spill
        self._on_end = on_end
        self._services: dict[str, Service] = {}
        self._queued: Counter[str] = Counter()
        self._inherited = inherited or Inherited()
        self._notifier = self._inherited.notifier
        self._store = FdStore(self._notifier, self._inherited.capacity)
        self._exporter = exporter
        #: True if the broker's loop ended without a request.
        self.failed = False
        self._asked_to_stop = False
        self._thread = threading.Thread(target=self._run, name="shared-rpc-broker", daemon=True)
        self._ready: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._scope: anyio.CancelScope
        self._spawn: Spawner
        self._supervisor: Supervisor

    def start(self, wait: Callable[[Future[None]], object] | None = None) -> None:
        """Start the workers, and listen. Returns when the app has been imported, or at once if an earlier broker's objects
        can be attached: requests that need a worker wait for one then.

        :param wait: waits for a future instead of its own method; if it returns before that is done, the broker is stopped.
        :raises WorkerCrashed: if no worker can load the app.
        :raises ConfigurationError: if a socket is not available; names the pid of a live server.
        :raises ConnectionClosed: if it was stopped in the meantime.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._thread.start()
        if wait is not None:
            wait(self._ready)
            if not self._ready.done():
                self.ask_to_stop()
        self._ready.result()

    def stop(self) -> None:
        """Stop: waiters get :class:`ConnectionClosed`, sockets are removed, workers end, clients keep their memory."""
        self._store.close()  # the stored state stays
        self._notifier.notify("STOPPING=1")
        for service in tuple(self._services.values()):
            service.acceptor.remove_socket()
        self.ask_to_stop()
        self._thread.join(_STOP_TIMEOUT)

    def ask_to_stop(self) -> None:
        """Begin to stop, without blocking. A :meth:`start` that still waits for the app raises :class:`ConnectionClosed`."""
        self._asked_to_stop = True
        with suppress(RuntimeError, AttributeError):  # the loop has ended, or has not begun and reads _asked_to_stop first
            self._loop.call_soon_threadsafe(self._scope.cancel)

    def reload(self, objects: str = "changed") -> ReloadInfo:
        """Start workers with the app's current code, which replace the old ones once they are ready.

        :param objects: the cached objects to drop: those whose endpoint has ``"changed"``, ``"all"`` or ``"none"``.
        :returns: the changes, by socket path.
        :raises WorkerCrashed: if the new code cannot be loaded; nothing has changed then.
        """
        self._ready.result()
        return asyncio.run_coroutine_threadsafe(self._reload(objects), self._loop).result()

    def served(self) -> dict[str, list[str]]:
        """Return the names of endpoints, by socket path."""
        services = tuple(self._services.values())
        return {service.acceptor.path: [spec.name for spec in service.core.registry.all()] for service in services}

    def _run(self) -> None:
        try:
            with CLOSER.spare_this_thread():
                run_loop(self._main)
        except BaseException as error:
            problem = _only(error)
            if not self._ready.done():
                self._ready.set_exception(problem)
            else:
                _log.exception("the broker failed")
                self.failed = True
                self._on_end("the broker failed")
        finally:
            if not self._ready.done():
                self._ready.set_exception(ConnectionClosed("the broker was stopped"))

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor(
            self._command, on_endpoints=self._serve_endpoints, on_change=self._take_change, on_lost=self._clean_up
        )
        with anyio.CancelScope() as self._scope:
            if self._asked_to_stop:
                self._scope.cancel()
            try:
                if self._exporter is not None:
                    self._exporter.start(self._loop, self._measures)
                async with anyio.create_task_group() as tasks:
                    self._spawn = Spawner(tasks)
                    self._spawn(self._supervisor.zygote.run)
                    self._store.recover(self._inherited.stored, self._recover_service)
                    await self._supervisor.start(self._spawn, wait=not self._services)
                    if not self._recovered and (problem := self._unserved()):
                        raise ConfigurationError(problem)
                    self._notifier.ready(self._status())
                    if not self._ready.done():
                        self._ready.set_result(None)
                    if self._options.idle_exit is None:
                        await anyio.sleep_forever()
                    else:
                        await self._wait_until_idle(self._options.idle_exit)
                        self._end(f"no client, lease or task for {self._options.idle_exit:g} s")
            finally:
                if self._exporter is not None:
                    self._exporter.close()
                for service in self._services.values():
                    service.executor.stop()
                    service.core.stop()
                    service.acceptor.remove_socket()
                self._supervisor.stop()
                for service in self._services.values():
                    service.core.close()

    def _measures(self) -> Reading:
        found = measures([service.core for service in self._services.values()])
        return found._replace(numbers={**found.numbers, **{each.name: each.read(self._supervisor) for each in WORKERS}})

    def _add_service(self, message: w.Serve, server_id: str | None = None) -> Service:
        """Add a service for a provider, as described by a worker.

        :param server_id: the id of an earlier broker's server.
        """
        executor = WorkerExecutor(message.key, self._supervisor, self._options.build_timeout, self._queued)
        core = Core(
            Registry(message.endpoints),
            executor,
            message.device,
            options=self._options,
            quotas=message.quotas,
            memory=RelayedMemory(message.devices, self._supervisor),
            spill=self._spill,
            mechanism=message.mechanism,
            socket_path=message.socket_path,
            server_id=server_id,
            descriptors=self._descriptors,
            cluster=message.cluster,
        )
        core.on_reload = self._reload_for_client
        core.on_stop = self._stop_for_client
        core.before_replies = self._store.write
        core.own_processes = lambda: {worker.pid for worker in self._supervisor.all}
        listener = self._inherited.listeners.pop(message.socket_path, None)
        acceptor = Acceptor(core, message.socket_path, self._options.max_connections, listener)
        if self._exporter is not None:
            self._exporter.watch(core.server_id)
        service = self._services[message.key] = Service(message, core, acceptor, executor)
        self._store.keep_service(message, core)
        self._spawn.vital(self._serve, service)
        return service

    async def _serve(self, service: Service) -> None:
        with anyio.CancelScope() as service.scope:
            async with anyio.create_task_group() as tasks:
                running = anyio.Event()
                tasks.start_soon(lambda: service.core.run(started=running))
                await running.wait()
                await service.acceptor.serve()

    def _serve_endpoints(self, message: w.Serve, earlier: w.Serve | None) -> None:
        """Serve a new provider, or the endpoints that the worker has added since its earlier message about it."""
        service = self._services.get(message.key)
        if earlier is None:
            if service is None:
                self._serve_new(message)
        elif service is not None and not service.recovered:  # recovered endpoints stay until the worker has loaded the app
            for spec in message.endpoints:
                if spec not in earlier.endpoints:
                    service.core.registry.add(spec)

    def _serve_new(self, message: w.Serve) -> None:
        for key in self._recovered:
            if self._services[key].acceptor.path == message.socket_path:
                self._replace(key, message)
        try:
            self._add_service(message)
        except SharedRPCError as error:
            if self._ready.done():
                _log.error("cannot serve a provider of the app: %s", error)
            else:
                self._ready.set_exception(error)
                self._scope.cancel()

    def _take_change(self) -> None:
        """Handle the first ready worker, and send queued runs."""
        ready = next((worker for worker in self._supervisor.workers if worker.state == "ready"), None)
        if ready is not None:
            if self._recovered:
                try:
                    self._take_over(ready, "changed")
                except SharedRPCError as error:
                    _log.error("%s", error)
                self._notifier.notify(f"STATUS={self._status()}")
            for service in self._services.values():
                self._store.keep_service(service.facts, service.core)
        for service in self._services.values():
            service.executor.send_waiting()

    def _clean_up(self, worker: Worker, crash: WorkerCrashed) -> None:
        """End or move the runs of an ended worker, and drop objects whose memory has ended with it."""
        worker.requests.fail(crash)
        for service in self._services.values():
            service.executor.lost(worker)
            service.core.drop_bound(worker.pid)

    # Recovery of an earlier broker's services and objects, until the app is loaded.

    @property
    def _recovered(self) -> list[str]:
        """The keys of providers still served as an earlier broker served them."""
        return [key for key, service in self._services.items() if service.recovered]

    def _recover_service(self, message: w.Serve, server_id: str) -> Core:
        service = self._add_service(message, server_id)
        service.recovered = True
        return service.core

    def _replace(self, key: str, message: w.Serve) -> None:
        """Discard a recovered service in favour of the app's provider that has its key or its socket."""
        earlier = self._services[key].facts
        _log.error(
            "the stored objects of %s at %s are dropped: the app now serves %s at %s",
            earlier.device,
            earlier.socket_path,
            message.device,
            message.socket_path,
        )
        self._discard(key)

    def _discard(self, key: str) -> None:
        service = self._services.pop(key)
        self._store.remove_service(key, service.core)
        path = service.acceptor.path
        if (listener := service.acceptor.inherited()) is not None:
            self._inherited.listeners[path] = listener
        service.acceptor.remove_socket()
        service.core.stop()
        service.core.close()
        if service.scope is not None:
            service.scope.cancel()

    def _unserved(self) -> str:
        """Return an error text for the service manager's sockets that no provider serves; ``""`` if there are none."""
        if not (listeners := self._inherited.listeners):
            return ""
        served = ", ".join(service.acceptor.path for service in self._services.values())
        return (
            f"the service manager listens at {', '.join(listeners)}, but the app serves at {served}: make ListenStream= and "
            f"the base path, the device or --socket agree"
        )

    def _status(self) -> str:
        """Return a one-line status for display."""
        count = sum(len(service.core.objects) for service in self._services.values())
        return f"{count} objects can be attached; the app is {'being loaded' if self._recovered else 'loaded'}"

    # The end of an idle broker.

    def _usage(self, asker: str = "") -> Usage:
        usages = [service.acceptor.usage(asker) for service in self._services.values()]
        return Usage(*map(sum, zip(*usages, strict=True))) if usages else Usage(0, 0, 0, 0)

    async def _wait_until_idle(self, seconds: float) -> None:
        """Return once the server has been unused for that long: not earlier, and at most two checks later.

        Nothing runs on the loop between the last check and the return.
        """
        pause = max(min(seconds / 10, _LONGEST), _SHORTEST)
        since, earlier = math.inf, -1
        while True:
            admitted = sum(service.acceptor.admitted for service in self._services.values())
            used = any(self._usage()) or admitted != earlier
            since, earlier = math.inf if used else min(since, time.monotonic()), admitted
            if time.monotonic() - since >= seconds:
                return
            await anyio.sleep(pause)

    def _end(self, why: str) -> None:
        # No client is admitted from here on: a client that was not admitted starts another server.
        self._scope.cancel()
        self._on_end(why)

    def _stop_for_client(self, session: str, if_idle: bool) -> StopInfo:
        usage = self._usage(session)
        if if_idle and any(usage):
            used = ", ".join(f"{count} {name}" for name, count in usage._asdict().items() if count)
            raise ServerBusy(f"the server (pid {os.getpid()}) is in use: {used}")
        cores = [service.core for service in self._services.values()]
        # Objects of several providers may share memory.
        segments = dict(itertools.chain.from_iterable(core.objects.segments().items() for core in cores))
        self._loop.call_soon(self._end, "a client asked the server to stop")
        return {
            "clients": usage.clients,
            "leases": usage.leases,
            "tasks": usage.tasks,
            "running": usage.running,
            "pid": os.getpid(),
            "socket_paths": [service.acceptor.path for service in self._services.values()],
            "objects": sum(len(core.objects) for core in cores),
            "nbytes": sum(usage_of(segments).values()),
        }

    # Reloading.

    async def _reload_for_client(self, objects: str) -> ReloadInfo:
        """Reload for a client. If the client leaves, the reload continues, and its error is dropped."""
        reload = asyncio.create_task(self._reload(objects))
        reload.add_done_callback(mark_retrieved)
        await asyncio.wait([reload])
        return reload.result()

    async def _reload(self, objects: str) -> ReloadInfo:
        if objects not in ("changed", "all", "none"):
            raise ConfigurationError(f"objects={objects!r}: use 'changed', 'all' or 'none'")
        self._notifier.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            return await self._load_new_code(objects)
        finally:
            self._notifier.ready(self._status())

    async def _load_new_code(self, objects: str) -> ReloadInfo:
        workers = await self._supervisor.reload()
        try:
            services = self._take_over(workers[0], objects)
        finally:
            self._take_change()
            self._supervisor.retire_old()
        _log.info("reloaded: workers %s", ", ".join(str(worker.pid) for worker in workers))
        return {"workers": [worker.pid for worker in workers], "services": services}

    def _take_over(self, worker: Worker, objects: str) -> dict[str, ReloadedServiceInfo]:
        """Serve the providers loaded by a worker, in place of earlier or recovered ones; return the changes by socket path.

        :raises ConfigurationError: at the end, if a new provider cannot listen.
        """
        recovered = self._recovered
        services: dict[str, ReloadedServiceInfo] = {}
        problem: SharedRPCError | None = None
        for key in {**worker.served, **self._services}:
            message, service = worker.served.get(key), self._services.get(key)
            specs = message.endpoints if message is not None else []
            if message is not None and service is not None:
                facts = service.facts
                if (message.socket_path, message.device) != (facts.socket_path, facts.device):
                    self._replace(key, message)
                    service = None
            if service is not None:
                changes = services[service.acceptor.path] = service.core.replace_endpoints(specs, objects)
                service.recovered = False
                if message is not None:
                    service.facts, service.core.mechanism = message, message.mechanism
                    service.core.capacity.set_limits(message.quotas)
                kept = len(service.core.objects)
                if key in recovered:
                    _log.info("recovered %s: %d objects kept, %d dropped", key, kept, changes["dropped"])
                    if message is None and not kept:
                        self._discard(key)
            elif message is not None:
                try:
                    self._add_service(message)
                except SharedRPCError as error:
                    problem = error
                else:
                    services[message.socket_path] = {"endpoints": [spec.name for spec in specs], "changed": [], "dropped": 0}
        if recovered and (unserved := self._unserved()):
            _log.error("%s", unserved)
        if problem is not None:
            raise ConfigurationError(
                f"the new code is running, but one of its providers could not be served: {problem}"
            ) from problem
        return services


def _only(error: BaseException) -> BaseException:
    """Return the error of a group of one: task groups wrap their errors."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
