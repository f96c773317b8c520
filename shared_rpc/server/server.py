"""The server's lifecycle: it listens in its own thread, and stops within a second."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shared_rpc.errors import ConfigurationError, ConnectionClosed
from shared_rpc.execution.endpoints import Endpoint, Registry
from shared_rpc.execution.in_process import InProcessExecutor
from shared_rpc.lifecycle.signals import wait_for_signal
from shared_rpc.memory.closing import CLOSER
from shared_rpc.memory.devices import device_tag, resolve_quotas
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.memory.spill import SpillDirectory
from shared_rpc.protocol.infos import MechanismInfo, ServerInfo
from shared_rpc.protocol.options import ClientCode, ServeOptions, check_when_full
from shared_rpc.server.acceptor import Acceptor
from shared_rpc.server.core import Core
from shared_rpc.server.engine import Engine
from shared_rpc.server.measures import SERVERS, measures
from shared_rpc.server.state.descriptors import Descriptors, mapped_limit
from shared_rpc.settings import resolve_base_path, socket_path

if TYPE_CHECKING:
    from shared_rpc.observability.exporter import Exporter


_log = logging.getLogger("shared_rpc.server")

_DEFAULTS = ServeOptions()


class App(Protocol):
    """An app to serve: a :class:`Provider`."""

    base_path: str | os.PathLike[str] | None
    pool: PoolOptions
    registry: Registry
    endpoints: dict[str, Endpoint]

    @property
    def device_id(self) -> str:
        """The id of the device of results."""

    @property
    def mechanism_info(self) -> MechanismInfo:
        """The mechanism that shares the memory of the device."""

    @property
    def cluster(self) -> str:
        """The cluster that servers join, ``""`` for none."""

    def serve_with(self, server: Any) -> None:
        """Route this process's own calls through a server that was started for the app."""


class Server:
    r"""A server of a provider's endpoints at a Unix socket, in a thread of its own.

    :param provider: the provider of the endpoints; those registered later are served too.
    :param socket_path: the socket's path; by default derived from the provider's base path and device.
    :param max_workers: threads that run endpoints; by default four more than there are cores, and at most 32.
    :param max_bytes: memory budget in bytes for objects without holders, see
        :class:`~shared_rpc.server.state.objects.ObjectStore`.
    :param max_tasks: tasks that may be pending or running; further submits fail with :class:`ServerBusy`.
    :param result_ttl: seconds a finished task is remembered, and its result kept until a client fetches it.
    :param quotas: maximum memory of objects and buffers together, by device (``"cuda:0"``, a GPU's UUID or ``"cpu"``): bytes
        as an int, or a fraction of the device's memory as a float up to 1.0.
    :param when_full: the policy for an object that does not fit into a quota: ``"refuse"`` it, unless cached objects without
        holders can be dropped for it; or ``"evict"`` unused objects to a lower tier while the request waits for capacity until
        its deadline.
    :param host_quota: maximum memory of host copies of evicted objects: bytes as an int, or a fraction of the host's memory as
        a float; by default any amount.
    :param spill_dir: a directory of this user, where objects are evicted to files without names; None for no files. Objects in
        host memory can only be evicted there.
    :param max_connections: connections beyond this are refused with :class:`ServerBusy`.
    :param pool: options of each session's memory for results that are not kept; by default those of the provider.
    :param cluster: the name of the cluster that the server joins, or the command line of a program that answers its misses, see
        :meth:`Client.source`; ``""`` for none. By default that of the provider.
    :param source_grace: seconds that open calls wait for another source of records after the last one has left, before they are
        built here; see :meth:`Client.source`.
    :param client_code: which clients may send pickled code, which workers and other clients run: modules and other arguments
        that are not plain tensors, and records to adopt. ``"all"``, those in the server's own pid ``"namespace"``, or
        ``"none"``. Calls of this process itself are not restricted.
    :param metrics_port: the HTTP port of Prometheus metrics; 0 for any free port, None for no metrics. It needs
            ``pip install 'shared-rpc[metrics]'``.
    :param metrics_host: the address of that port. By default it is reachable from this host alone.
    """

    def __init__(
        self,
        provider: App,
        *,
        socket_path: str | os.PathLike[str] | None = None,
        max_workers: int | None = None,
        max_bytes: int | None = None,
        max_tasks: int = _DEFAULTS.max_tasks,
        result_ttl: float = _DEFAULTS.result_ttl,
        quotas: Mapping[str, int | float] | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        when_full: Literal["evict", "refuse"] = _DEFAULTS.when_full,
        host_quota: float | None = None,
        max_connections: int = _DEFAULTS.max_connections,
        pool: PoolOptions | None = None,
        cluster: str | None = None,
        source_grace: float = _DEFAULTS.source_grace,
        client_code: ClientCode = _DEFAULTS.client_code,
        metrics_port: int | None = None,
        metrics_host: str = _DEFAULTS.metrics_host,
    ) -> None:
        self._provider = provider
        check_when_full(when_full, quotas or {})
        self._pool = pool
        self._options = ServeOptions(
            socket=os.path.abspath(socket_path) if socket_path is not None else None,
            threads=max_workers,
            max_bytes=max_bytes,
            max_tasks=max_tasks,
            result_ttl=result_ttl,
            quotas=dict(quotas or {}),
            spill_dir=os.fspath(spill_dir) if spill_dir is not None else None,
            when_full=when_full,
            host_quota=host_quota,
            max_connections=max_connections,
            cluster=cluster,
            source_grace=source_grace,
            client_code=client_code,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
        self._engine: Engine | None = None
        self._acceptor: Acceptor | None = None
        self._exporter: Exporter | None = None

    @property
    def socket_path(self) -> str:
        """The path at which the server listens, or will listen."""
        if self._options.socket is not None:
            return self._options.socket
        return socket_path(resolve_base_path(self._provider.base_path), device_tag(self._provider.device_id))

    @property
    def metrics_url(self) -> str | None:
        """The URL of a running server's metrics, None without a metrics port."""
        return self._exporter.url if self._exporter is not None else None

    @property
    def running(self) -> bool:
        """True while it serves."""
        return self._engine is not None and self._engine.running

    @property
    def busy(self) -> bool:
        """True while a thread runs an endpoint, perhaps after :meth:`stop`."""
        return self._engine is not None and self._engine.busy

    @property
    def engine(self) -> Engine:
        """The engine that carries out the calls.

        :raises ConnectionClosed: if the server does not run.
        """
        if self._engine is None or not self._engine.running:
            raise ConnectionClosed(f"the server of this process at {self.socket_path} is not running: call start()")
        return self._engine

    def start(self, blocking: bool = False) -> Server:
        """Listen. With ``blocking``, return only after SIGINT or SIGTERM, when the server was stopped.

        Raises this process's soft limit of open files to the hard one: every client and every segment needs some.

        :raises ConfigurationError: if the socket is not available (names the pid of a live server), nor the metrics port or its
            package, a package that the cluster needs, or the spill directory.
        """
        if self.running:
            raise ConfigurationError(f"this server is running already, at {self.socket_path}")
        if blocking:
            wait_for_signal(self.start, end=self.stop)
            return self
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        path, device, options = self.socket_path, self._provider.device_id, self._options
        mechanism = self._provider.mechanism_info
        executor = InProcessExecutor(self._provider.endpoints, device, self._pool or self._provider.pool, options.threads)
        core = Core(
            self._provider.registry,
            executor,
            device,
            options=options,
            quotas=resolve_quotas(options.quotas, device),
            spill=SpillDirectory(options.spill_dir) if options.spill_dir is not None else None,
            mechanism=mechanism,
            socket_path=path,
            descriptors=Descriptors(mapped_limit, CLOSER.__len__),
            cluster=self._provider.cluster if options.cluster is None else options.cluster,
        )
        with ExitStack() as failed:
            exporter: Exporter | None = None
            if options.metrics_port is not None:
                from shared_rpc.observability.exporter import Exporter

                exporter = Exporter(SERVERS, options.metrics_port, options.metrics_host)
                failed.callback(exporter.close)
            acceptor = Acceptor(core, path, options.max_connections)
            failed.callback(acceptor.close)
            engine = Engine(core, executor, f"the server of this process at {path}", acceptor.serve)
            engine.start()
            failed.pop_all()
        self._engine, self._acceptor = engine, acceptor
        MAPPINGS.servers[core.server_id] = path
        MAPPINGS.homes.add(path)
        if exporter is not None:
            exporter.watch(core.server_id)
            exporter.start(engine.loop, lambda: measures([core]))
            self._exporter = exporter
        self._provider.serve_with(self)
        _log.info("serving on %s", path)
        return self

    def stop(self) -> None:
        """Stop within a second: waiters get :class:`ConnectionClosed`, the socket is removed, clients keep their memory."""
        if self._engine is not None and self._acceptor is not None and self._engine.pid == os.getpid():
            self._acceptor.remove_socket()
            self._engine.stop()
            MAPPINGS.homes.discard(self.socket_path)
            if self._exporter is not None:
                self._exporter.close()
                self._exporter = None

    def info(self) -> ServerInfo:
        """Return the same as ``get_server_info``."""
        return self.engine.ask(lambda core: core.info())

    def __enter__(self) -> Server:
        if not self.running:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
