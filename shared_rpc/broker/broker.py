"""A broker: sockets, sessions, objects and tasks in this process, endpoints in workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from shared_rpc.broker.command import WorkerCommand
from shared_rpc.broker.dispatch import Dispatcher, WorkerExecutor
from shared_rpc.broker.idle_exit import wait_until_idle
from shared_rpc.broker.memory import RelayedMemory, WorkersMemory
from shared_rpc.broker.recovery import Recovery, Service
from shared_rpc.broker.service_manager import ServiceManager
from shared_rpc.broker.spawning import Spawner
from shared_rpc.broker.supervisor import WORKERS, Supervisor
from shared_rpc.broker.systemd import Inherited
from shared_rpc.broker.worker import Handler, Worker
from shared_rpc.broker.zygote import WorkerZygote
from shared_rpc.errors import ConfigurationError, ConnectionClosed, ServerBusy, SharedRPCError, WorkerCrashed
from shared_rpc.execution.endpoints import Registry
from shared_rpc.execution.limits import resolve_host_quota
from shared_rpc.execution.loop import run_loop
from shared_rpc.execution.outcomes import Failure
from shared_rpc.memory.closing import CLOSER
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.observability.metrics import Reading
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.infos import ReloadedServiceInfo, ReloadInfo, StopInfo
from shared_rpc.protocol.messages import Message
from shared_rpc.server.acceptor import Acceptor, Usage
from shared_rpc.server.core import Core
from shared_rpc.server.measures import measures
from shared_rpc.server.state.descriptors import Descriptors
from shared_rpc.server.state.objects import usage_of

if TYPE_CHECKING:
    from shared_rpc.observability.exporter import Exporter

__all__ = ["Broker"]

_log = logging.getLogger("shared_rpc.broker")

#: Seconds that :meth:`Broker.stop` waits for the thread.
_STOP_TIMEOUT = 3.0


class Broker:
    """A server of an app's providers, in a thread of its own, with the endpoints in worker processes.

    :param on_end: called in its thread with the reason when it ends because it is idle, has failed, or a client asked it to.
    :param inherited: descriptors passed by a service manager; see :class:`shared_rpc.broker.systemd.Inherited`.
    :param exporter: serves metrics, None for no metrics; it is closed in the end.
    :param spill: where objects are evicted to files, None if they are not.
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
        self._manager = ServiceManager(inherited or Inherited())
        self._recovery = Recovery(self._services, self._manager, self._add_service)
        self._exporter = exporter
        #: Whether the broker's loop ended without a request.
        self.failed = False
        self._asked_to_stop = False
        self._thread = threading.Thread(target=self._run, name="shared-rpc-broker", daemon=True)
        self._ready: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._scope: anyio.CancelScope
        self._spawn: Spawner
        self._supervisor: Supervisor
        self._zygote: WorkerZygote
        self._dispatcher: Dispatcher
        self._memory: WorkersMemory

    def start(self, wait: Callable[[Future[None]], object] | None = None) -> None:
        """Start the workers, and listen. Returns when the app has been imported, or at once where an earlier broker's
        objects can be attached: what needs a worker waits for one then.

        :param wait: waits for a future in place of its own method; if it returns before that is done, the broker is stopped.
        :raises WorkerCrashed: if it cannot be.
        :raises ConfigurationError: if a socket cannot be had; a live server's pid is named.
        :raises ConnectionClosed: if it was stopped meanwhile.
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
        """Stop: waiters get :class:`ConnectionClosed`, the sockets go, the workers end, clients keep their memory."""
        self._manager.stopping()
        for service in tuple(self._services.values()):
            service.acceptor.remove_socket()
        self.ask_to_stop()
        self._thread.join(_STOP_TIMEOUT)

    def ask_to_stop(self) -> None:
        """Begin to stop, without a wait. A :meth:`start` that still waits for the app raises :class:`ConnectionClosed`."""
        self._asked_to_stop = True
        with suppress(RuntimeError, AttributeError):  # the loop has ended, or has not begun and reads _asked_to_stop first
            self._loop.call_soon_threadsafe(self._scope.cancel)

    def reload(self, objects: str = "changed") -> ReloadInfo:
        """Have new workers read the app's code, and let them take over when they are ready.

        :param objects: which cached objects are dropped: those whose endpoint has ``"changed"``, ``"all"`` or ``"none"``.
        :returns: the changes, by socket path.
        :raises WorkerCrashed: if the new code cannot be loaded; then nothing has changed.
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
        self._zygote = WorkerZygote(self._command)
        self._dispatcher = Dispatcher(self._current, self._refusal, self._options.build_timeout)
        self._memory = WorkersMemory(self._current, self._bare)
        handlers: dict[type[Message], Handler] = {w.ChunksReturned: self._returned}
        self._supervisor = Supervisor(self._command, self._options.workers, self, self._zygote, handlers)
        with anyio.CancelScope() as self._scope:
            if self._asked_to_stop:
                self._scope.cancel()
            try:
                if self._exporter is not None:
                    self._exporter.start(self._loop.call_soon_threadsafe, self._measures)
                async with anyio.create_task_group() as tasks:
                    self._spawn = Spawner(tasks)
                    self._spawn(self._zygote.run)
                    self._recovery.recover()
                    await self._supervisor.start(self._spawn, wait=not self._services)
                    self._manager.check(self.served(), loaded=not self._recovery.pending)
                    self._manager.notifier.ready(self._recovery.status())
                    if not self._ready.done():
                        self._ready.set_result(None)
                    if self._options.idle_exit is None:
                        await anyio.sleep_forever()
                    else:
                        await wait_until_idle(self._options.idle_exit, self._look)
                        self._end(f"no client, lease or task for {self._options.idle_exit:g} s")
            finally:
                if self._exporter is not None:
                    self._exporter.close()
                self._dispatcher.stop()
                for service in self._services.values():
                    service.core.stop()
                    service.acceptor.remove_socket()
                self._supervisor.stop()
                for service in self._services.values():
                    service.core.close()

    def _current(self) -> list[Worker]:
        return self._supervisor.workers

    async def _bare(self) -> Worker:
        return await self._supervisor.bare()

    def _measures(self) -> Reading:
        found = measures([service.core for service in self._services.values()])
        return found._replace(numbers={**found.numbers, **{each.name: each.read(self._supervisor) for each in WORKERS}})

    def _refusal(self) -> SharedRPCError | None:
        return self._supervisor.refusal()

    def _add_service(self, message: w.Serve, server_id: str | None = None) -> Service:
        """Make a service of a provider, as a worker describes it.

        :param server_id: of an earlier broker's server.
        """
        executor = WorkerExecutor(message.key, self._dispatcher, self._current, self._zygote.info)
        core = Core(
            Registry(message.endpoints),
            executor,
            message.device,
            executor.transfers,
            max_bytes=self._options.max_bytes,
            max_tasks=self._options.max_tasks,
            result_ttl=self._options.result_ttl,
            quotas=message.quotas,
            when_full=self._options.when_full,
            host_quota=resolve_host_quota(self._options.host_quota),
            memory=RelayedMemory(self._memory, message.devices),
            spill=self._spill,
            mechanism=message.mechanism,
            socket_path=message.socket_path,
            server_id=server_id,
            descriptors=self._descriptors,
            cluster=message.cluster,
            source_grace=self._options.source_grace,
            client_code=self._options.client_code,
        )
        core.on_reload = self._reload_for_client
        core.on_stop = self._stop_for_client
        core.own_processes = lambda: {worker.pid for worker in self._supervisor.all}
        listener = self._manager.listener(message.socket_path)
        acceptor = Acceptor(core, message.socket_path, self._options.max_connections, listener)
        if self._exporter is not None:
            self._exporter.watch(core.server_id)
        service = self._services[message.key] = Service(message, core, acceptor, executor)
        self._manager.watch(message, core)
        self._spawn.vital(self._serve, service)
        return service

    async def _serve(self, service: Service) -> None:
        with anyio.CancelScope() as service.scope:
            async with anyio.create_task_group() as tasks:
                running = anyio.Event()
                tasks.start_soon(lambda: service.core.run(started=running))
                await running.wait()
                await service.acceptor.serve()

    def on_endpoints(self, worker: Worker, message: w.Serve | w.Shared) -> None:
        """Serve a provider that is new, or one more endpoint."""
        service = self._services.get(message.key)
        if service is not None and service.recovered:
            return  # the earlier endpoints stay until the worker has loaded the app
        if isinstance(message, w.Shared):
            if service is not None:  # otherwise listening failed, and that is logged
                service.core.registry.add(message.endpoint)
        elif service is None:
            self._serve_anew(message)

    def _serve_anew(self, message: w.Serve) -> None:
        self._recovery.make_way(message)
        try:
            self._add_service(message)
        except SharedRPCError as error:
            if self._ready.done():
                _log.error("cannot serve a provider of the app: %s", error)
            else:
                self._ready.set_exception(error)
                self._scope.cancel()

    # Messages of workers.

    def _returned(self, worker: Worker, message: w.ChunksReturned, frame: Frame) -> None:
        service = self._services.get(message.key)
        transfer = service.executor.transfers.find(message.session) if service is not None else None
        if transfer is not None:
            transfer.came_back(worker, message.chunks)

    # Events of workers.

    def on_change(self) -> None:
        """Meet the first worker that is ready, and send waiting runs."""
        ready = next((worker for worker in self._supervisor.workers if worker.state == "ready"), None)
        if ready is not None:
            if self._recovery.pending:
                self._recovery.reconcile(ready)
            for service in self._services.values():
                self._manager.keep_service(service.facts, service.core)
        self._dispatcher.send_waiting()

    def on_caught_up(self) -> None:
        """Send waiting runs."""
        self._dispatcher.send_waiting()

    def on_lost(self, worker: Worker, crash: WorkerCrashed) -> None:
        """End or move the runs of a worker, and drop objects whose memory has ended with it."""
        worker.requests.fail(crash)
        self._memory.lost(worker)
        for service in self._services.values():
            service.executor.lost(worker)
            service.core.drop_bound(worker.pid)

    # The end of an idle broker.

    def _usage(self, asker: str = "") -> Usage:
        usages = [service.acceptor.usage(asker) for service in self._services.values()]
        return Usage(*map(sum, zip(*usages, strict=True))) if usages else Usage(0, 0, 0, 0)

    def _look(self) -> tuple[bool, int]:
        return any(self._usage()), sum(service.acceptor.admitted for service in self._services.values())

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

    def _reload_for_client(self, objects: str, answer: Callable[[ReloadInfo | Failure], None]) -> None:
        async def work() -> None:
            try:
                answer(await self._reload(objects))
            except Exception as error:
                if not isinstance(error, SharedRPCError):
                    _log.exception("a reload failed")
                answer(Failure.of(error))

        self._spawn(work)

    async def _reload(self, objects: str) -> ReloadInfo:
        if objects not in ("changed", "all", "none"):
            raise ConfigurationError(f"objects={objects!r}: use 'changed', 'all' or 'none'")
        with self._manager.reloading(self._recovery.status):
            return await self._load_anew(objects)

    async def _load_anew(self, objects: str) -> ReloadInfo:
        workers = await self._supervisor.reload()
        if self._recovery.pending:
            self._recovery.reconcile(workers[0])
        try:
            services = self._replace_endpoints(workers[0], objects)
        finally:
            self._dispatcher.send_waiting()
            self._supervisor.retire_old()
        _log.info("reloaded: workers %s", ", ".join(str(worker.pid) for worker in workers))
        return {"workers": [worker.pid for worker in workers], "services": services}

    def _replace_endpoints(self, worker: Worker, objects: str) -> dict[str, ReloadedServiceInfo]:
        """Replace the endpoints by a worker's; return the changes by socket path.

        :raises ConfigurationError: when all is done, if there is no place to listen for a provider that is new.
        """
        services: dict[str, ReloadedServiceInfo] = {}
        problem: SharedRPCError | None = None
        for key, message in worker.served.items():
            service = self._services.get(key)
            specs = list(worker.endpoints[key].values())
            if service is None:
                try:
                    self._add_service(message)
                except SharedRPCError as error:
                    problem = error
                    continue
                services[message.socket_path] = {"endpoints": [spec.name for spec in specs], "changed": [], "dropped": 0}
            else:
                services[service.acceptor.path] = service.core.replace_endpoints(specs, objects)
        for key in set(self._services) - set(worker.served):
            service = self._services[key]
            services[service.acceptor.path] = service.core.replace_endpoints([], objects)
        for service in self._services.values():
            self._manager.keep_service(service.facts, service.core)
        if problem is not None:
            raise ConfigurationError(f"the new code runs, but a provider of it is not served: {problem}") from problem
        return services


def _only(error: BaseException) -> BaseException:
    """Return the error of a group of one: task groups wrap their errors."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
