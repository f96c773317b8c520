"""Providers: shared functions, and the role of the process."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from shared_rpc.client.base import preload_codec
from shared_rpc.client.steps import Operation
from shared_rpc.errors import ConfigurationError
from shared_rpc.execution.endpoints import Endpoint, Registry, describe
from shared_rpc.forks import after_fork, fork_safe_lock
from shared_rpc.lifecycle.ending import is_child
from shared_rpc.memory.backends.choice import MechanismOption, choose_mechanism, mechanism_info
from shared_rpc.memory.devices import device_id
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.operations.binding import bound
from shared_rpc.operations.client import BlockingOperations, Client
from shared_rpc.operations.handles import Handle
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.infos import MechanismInfo, RuntimeInfo
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.provider.main_end import register, unregister
from shared_rpc.provider.runtime import ClientRuntime, Host, LocalRuntime, Runtime, ServerRuntime, host
from shared_rpc.server.server import Server
from shared_rpc.settings import Role, resolve_cluster, resolve_role

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class SharedFunction(Generic[P, R_co]):
    """An endpoint, called like the function given to :meth:`Provider.share`."""

    def __init__(self, provider: Provider, endpoint: Endpoint) -> None:
        functools.update_wrapper(self, endpoint.function)
        self._provider = provider
        self._endpoint = endpoint

    @property
    def name(self) -> str:
        """The endpoint's name."""
        return self._endpoint.spec.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the endpoint; return its result, or a :class:`Handle` if it is managed.

        An ``async def`` endpoint returns an awaitable, in every role.
        """
        runtime = self._provider._runtime()
        if self._endpoint.spec.is_async:
            return cast(R_co, runtime.acall(self.name, args, kwargs))
        return cast(R_co, runtime.operations.call(self.name, *args, **kwargs))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Run the call as a task; return the task's id. See :meth:`Client.submit`."""
        return self._provider.submit(self.name, *args, **kwargs)

    def refresh(self, *args: P.args, **kwargs: P.kwargs) -> Generation:
        """Build the next generation of this call's object, and make it the current one. See :meth:`Client.refresh`."""
        return self._provider.refresh(self.name, *args, **kwargs)

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """Drop the cached result of this call; return 1 if there was one."""
        return self._provider.invalidate_call_cache(self.name, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<shared function {self.name}>"

    def __reduce__(self) -> Any:
        # By its name, if another process can import it, like any function: its provider is that module's there.
        if _importable(self):
            return vars(self)["__qualname__"]
        return _restored, (self._provider, self._endpoint)


def _restored(provider: Provider, endpoint: Endpoint) -> SharedFunction[..., Any]:
    """Rebuild a function of a script in another process: with a provider that has this endpoint."""
    return provider._add(endpoint)


def _importable(function: Any) -> bool:
    """Return True if another process can import a function by its name: not from a script or pickled code."""
    from shared_rpc.codec.by_value import travels_as_code

    module = function.__module__
    if module in ("__main__", "__mp_main__") or travels_as_code(module):
        return False
    found: Any = sys.modules.get(module)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


class Decorator(Protocol):
    """The decorator that ``share(...)`` returns."""

    def __call__(self, function: Callable[P, R], /) -> SharedFunction[P, R]:
        """Make a function an endpoint."""


class ManagedDecorator(Protocol):
    """The decorator that ``share(managed=True)`` returns."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> SharedFunction[P, Coroutine[Any, Any, Handle[R]]]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> SharedFunction[P, Handle[R]]: ...


class _Options(TypedDict, total=False):
    """Options of an endpoint, except its name and ``managed``; :func:`describe` has the defaults."""

    execution: Literal["direct", "task"]
    concurrency: Literal["parallel", "serialized"]
    cache: bool
    cache_format_key: str | None
    singleflight: bool
    access: Literal["read_write", "read"]
    tensors: Literal["all", "parameters"]
    idle_ttl: float | None
    host_copy: Literal["never", "on_evict", "at_build"]
    pinned: bool


@bound
class Provider(BlockingOperations):
    """Endpoints, and the role of this process for them.

    The role is resolved on first use, never at import: see :mod:`shared_rpc.settings` for the two environment variables. In
    the server role the process serves from its first call on, or from the end of its main code, and continues until SIGINT or
    SIGTERM.

    :param base_path: the prefix of the socket's path, see :func:`shared_rpc.settings.resolve_base_path`.
    :param enabled: overrides ``SHARED_TENSOR_ENABLED``.
    :param execution_mode: ``"local"``, ``"server"``, ``"client"`` or ``"spawn"`` overrides ``SHARED_TENSOR_ROLE``; ``"auto"``
        does not. ``"spawn"`` is a client that starts a detached server for the provider's file if none listens.
    :param device: the device of results: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.
    :param mechanism: how this process shares a GPU's memory: ``"vmm"``, ``"ipc"``, ``"pool"``, or ``"auto"`` for the first one
        that the GPU supports; see ``docs/explanation/mechanisms.md``.
    :param timeout: maximum seconds of a client's call; None for no limit.
    :param server_startup_timeout: seconds that a client waits until a server listens; in the spawn role from its start.
    :param idle_exit: idle seconds after which a server started by the spawn role ends; None for never.
    :param preload: True if the workers of a server started by the spawn role may be forks of a process that has imported the
        packages imported by the file; see ``docs/explanation/crashes.md``.
    :param pool: options of each session's memory for arguments, and for results that are not kept.
    :param cluster: overrides ``SHARED_TENSOR_CLUSTER``: the cluster that this provider's server joins, see :class:`Server`.
    """

    def __init__(
        self,
        base_path: str | os.PathLike[str] | None = None,
        *,
        enabled: bool | None = None,
        execution_mode: Literal["auto", "local", "server", "client", "spawn"] = "auto",
        device: str = "auto",
        mechanism: MechanismOption = "auto",
        timeout: float | None = 600.0,
        server_startup_timeout: float = 30.0,
        idle_exit: float | None = 3600.0,
        preload: bool = True,
        pool: PoolOptions | None = None,
        cluster: str | None = None,
    ) -> None:
        self.base_path = base_path
        self.device = device
        self.mechanism = mechanism
        self.timeout = timeout
        self.server_startup_timeout = server_startup_timeout
        self.idle_exit = idle_exit
        self.preload = preload
        self.asked_cluster = cluster
        if idle_exit is not None and idle_exit <= 0:
            raise ConfigurationError(f"idle_exit={idle_exit!r}: use seconds above 0, or None for never")
        self.pool = pool or PoolOptions()
        self.registry = Registry()
        self.endpoints: dict[str, Endpoint] = {}
        self._enabled = enabled
        self._asked_role: str = execution_mode
        self._role: Role | None = None
        self._working: Runtime | None = None
        #: In a forked child, the parent's runtime.
        self._inherited: Runtime | None = None
        self._lock = fork_safe_lock()
        self._closed = False
        self._pid = os.getpid()
        preload_codec()
        register(self)
        after_fork(self._after_fork)

    @property
    def execution_mode(self) -> Role:
        """The role of this process: ``"local"``, ``"server"``, ``"client"`` or ``"spawn"``.

        A child of a server's process, forked or started by :mod:`multiprocessing`, is a client of that server; so is the forked
        child of a process that has started a server. The worker of a started server is that server.
        """
        if self._role is None:
            role = resolve_role(self._enabled, self._asked_role)
            if role in ("server", "spawn") and self._has_server_above(role):
                role = "client"
            elif role == "spawn" and host() is not None:
                role = "server"
            self._role = role
        return self._role

    def _has_server_above(self, role: Role) -> bool:
        if self._inherited is not None and self._inherited.role in ("server", "spawn"):
            return True
        # A parent of web workers by multiprocessing has no server: the first worker that needs one starts it.
        return is_child() and (role == "server" or host() is not None)

    @property
    def device(self) -> str:
        """The device of results, as given. It may be set before the provider is used."""
        return self._device

    @device.setter
    def device(self, device: str) -> None:
        self._device = device
        for derived in ("device_id", "mechanism_info"):
            vars(self).pop(derived, None)

    @functools.cached_property
    def device_id(self) -> str:
        """The id of the device of results: ``"cpu"`` or a GPU's UUID."""
        return device_id(self.device)

    @property
    def cluster(self) -> str:
        """The cluster that the server of this provider joins, ``""`` for none."""
        return resolve_cluster(self.asked_cluster)

    @functools.cached_property
    def mechanism_info(self) -> MechanismInfo:
        """The mechanism that shares this process's memory of its device.

        :raises ConfigurationError: for an unknown ``mechanism``, or one that does not fit the device.
        :raises CapabilityError: if the GPU lacks a requested feature.
        """
        return mechanism_info(self.mechanism, self.device_id)

    @property
    def client_options(self) -> dict[str, Any]:
        """The options of a client of the provider's server, see :class:`shared_rpc.Client`."""
        return {
            "base_path": self.base_path,
            "device": self.device,
            "timeout": self.timeout,
            "connect_timeout": self.server_startup_timeout,
            "pool": self.pool,
        }

    @overload
    def share(self, name: Callable[P, R], /) -> SharedFunction[P, R]: ...

    @overload
    def share(self, name: str | None = None, *, managed: Literal[True], **options: Unpack[_Options]) -> ManagedDecorator: ...

    @overload
    def share(self, name: str | None = None, *, managed: Literal[False] = False, **options: Unpack[_Options]) -> Decorator: ...

    def share(self, name: Any = None, **options: Any) -> Any:
        """Make a function an endpoint; with or without parentheses.

        The function returns None, or any object that reaches at least one tensor or module: these are shared, and the rest of
        the object is rebuilt in every process that requests it. :class:`CapabilityError` is raised, in every role, for an
        object that reaches none, for one that cannot be pickled, and for a tensor with an autograd graph that is not in a
        module.

        :param name: the endpoint's name for clients; the function's own name by default.
        :param execution: ``"task"`` for long-running endpoints: their calls use the threads of tasks, so that they do not delay
            short calls. The default is ``"direct"``.
        :param concurrency: ``"serialized"`` runs the endpoint one call at a time; the default is ``"parallel"``.
        :param cache: True, the default, if identical calls get the same object.
        :param cache_format_key: a format string over the arguments, such as ``"model:{hidden_size}"``: calls are identical if
            their strings are. By default all arguments count.
        :param managed: return a :class:`Handle`, whose lease keeps the object, in every role.
        :param singleflight: True, the default, if a cached call joins an active run of an identical one.
        :param access: ``"read"`` maps the memory read-only in clients. It protects against accidents: a write ends its
            client, with SIGSEGV on the host and an illegal memory access on a GPU (under NVIDIA's MPS, also the other clients
            of the service). The default is ``"read_write"``.
        :param tensors: ``"parameters"`` shares only the memory used by a :class:`torch.nn.Parameter`, anywhere in the result:
            each attaching process gets its own copy of every other tensor (buffers, statistics, scales), on the same device,
            with its bytes at the endpoint's return, writable even with ``access="read"``. The process that ran the endpoint
            keeps its own. The default is ``"all"``.
        :param idle_ttl: seconds after which a cached result that is neither held nor requested is dropped; by default never.
        :param host_copy: when a result gets a copy in a lower tier, to be restored from: ``"at_build"``,
            in the background, right after the build; ``"never"``, so that it is not evicted; the default is ``"on_evict"``.
        :param pinned: True if results are never evicted from their device; False by default.
        :raises TypeError: for an unknown option.
        :raises ConfigurationError: for a value that cannot be used, such as a template that names no argument.
        """
        if callable(name):
            return self._share(name, None, options)
        return lambda function: self._share(function, name, options)

    def _share(self, function: Callable[P, R], name: str | None, options: dict[str, Any]) -> SharedFunction[P, R]:
        return cast("SharedFunction[P, R]", self._add(Endpoint(describe(function, name, **options), function)))

    def _add(self, endpoint: Endpoint) -> SharedFunction[..., Any]:
        name, working = endpoint.spec.name, self._working
        replaced = self.endpoints.get(name)
        self.endpoints[name] = endpoint
        self.registry.add(endpoint.spec)
        if replaced is not None and replaced.spec != endpoint.spec and isinstance(working, LocalRuntime | ServerRuntime):
            # Its results are of other code, as after a reload. A function defined again without a change keeps them.
            working.invalidate_endpoint_cache(name)
        return SharedFunction(self, endpoint)

    def get_endpoint(self, name: str) -> EndpointSpec:
        """Return the options of an endpoint of this process.

        :raises EndpointNotFound: if there is none of that name.
        """
        return self.registry.get(name)

    def list_endpoints(self) -> dict[str, EndpointSpec]:
        """Return the options of all endpoints of this process, by name."""
        return {spec.name: spec for spec in self.registry.all()}

    def get_runtime_info(self) -> RuntimeInfo:
        """Return the role of this process, and the role's facts: its socket path and server."""
        info: RuntimeInfo = {
            "execution_mode": self.execution_mode,
            "device": self.device_id,
            "mechanism": self.mechanism_info,
            "pid": os.getpid(),
        }
        self._runtime().describe(info)
        return info

    def close(self) -> None:
        """End the role: disconnect, or stop serving. Returned tensors stay valid; every later call fails."""
        with self._lock:
            self._closed = True
            working, self._working = self._working, None
            unregister(self)
        if working is not None:
            working.close()

    def serve_with(self, server: Server) -> None:
        """Route this process's own calls to a server that was started for the provider."""
        with self._lock:
            self._closed = False
            self._role = "server"
            register(self)
            self._working = ServerRuntime(server)

    def run_in(self, host: Host) -> None:
        """Begin to run in the host of this process, unless a call did before."""
        with self._lock:  # before the host's own lock, like a first call from another thread
            host.adopt(self)

    def run_with(self, runtime: Runtime) -> None:
        """Route this process's own calls to the runtime of its host."""
        with self._lock:
            self._role, self._working = runtime.role, runtime

    @classmethod
    def _bound(cls, name: str, body: Callable[..., Operation[Any]]) -> Callable[..., Any]:
        def method(self: Provider, /, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._runtime().operations, name)(*args, **kwargs)

        return method

    def _run(self, operation: Operation[T]) -> T:
        return self._operating()._run(operation)

    def _operating(self) -> BlockingOperations:
        return self._runtime().operations

    def _runtime(self) -> Runtime:
        """Return the runtime of the role, which begins with the first operation."""
        working = self._working
        if working is not None:
            return working
        with self._lock:
            if self._closed:
                raise ConfigurationError("this provider is closed")
            if self._working is None:
                self._working = self._start(self.execution_mode)
            return self._working

    def _start(self, role: Role) -> Runtime:
        worker = host() if role == "server" else None
        if worker is not None:
            return cast("Runtime", worker.adopt(self))  # which may override the device
        if self.mechanism != "auto":
            choose_mechanism(self.mechanism, self.device_id)
        if role != "server":
            unregister(self)  # it never serves, and ends with its last reference: a reloaded module makes another one
        if role == "client":
            return ClientRuntime(Client(**self.client_options))
        if role == "spawn":
            from shared_rpc.provider.spawn import SpawnRuntime, target_of

            return SpawnRuntime(self.client_options, lambda: target_of(self), self.idle_exit, self.preload, self.asked_cluster)
        if role == "local":
            return LocalRuntime(self, self._inherited)
        Server(self).start()  # calls serve_with()
        assert self._working is not None, "a started server is the provider's runtime"
        return self._working

    def _serves_at_end(self) -> bool:
        return not self._closed and self._pid == os.getpid() and self.execution_mode == "server"

    def _after_fork(self) -> None:
        if self._working is not None:
            self._inherited, self._working, self._role = self._working, None, None

    def _server_at_end(self) -> Server | None:
        """Return the server that continues after the main code, started if necessary; None if it was stopped."""
        if not self._serves_at_end():
            return None
        runtime = self._runtime()
        return runtime.server if isinstance(runtime, ServerRuntime) and runtime.server.running else None

    def __reduce__(self) -> Any:
        # A class pickled as code may refer to the provider of its script; the other side has its own role.
        return functools.partial(
            Provider,
            self.base_path,
            device=self.device,
            mechanism=self.mechanism,
            timeout=self.timeout,
            server_startup_timeout=self.server_startup_timeout,
            idle_exit=self.idle_exit,
            preload=self.preload,
            pool=self.pool,
            cluster=self.asked_cluster,
        ), ()
