"""What carries out a provider's calls: one class for each role, chosen once.

Local and server role answer with live values of this process, through the core that answers a server's clients; the
client role asks a server. The provider does not know which one it has.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from shared_rpc.client import Client
from shared_rpc.errors import ConfigurationError, ConnectionClosed, StaleHandleError
from shared_rpc.handle import Handle
from shared_rpc.memory.devices import device_kind
from shared_rpc.server.core import Core, Delivery
from shared_rpc.server.engine import Engine
from shared_rpc.server.executor import CHAIN, InProcessExecutor
from shared_rpc.settings import Role

if TYPE_CHECKING:
    from shared_rpc.provider import Provider
    from shared_rpc.server import Server

__all__ = ["ClientRuntime", "InProcessRuntime", "LocalRuntime", "Runtime", "ServerRuntime"]

T = TypeVar("T")


class Runtime(Protocol):
    """A role at work."""

    role: Role

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The endpoint's result, or a handle where it is managed."""

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for a caller on an event loop, which goes on meanwhile."""

    def invalidate_call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """See :meth:`Client.invalidate_call_cache`."""

    def invalidate_endpoint(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""

    def info(self) -> dict[str, Any]:
        """What ``get_runtime_info`` adds for this role."""

    def close(self) -> None:
        """End the role: hang up, or stop serving."""


class ClientRuntime:
    """Every call goes to a server of another process."""

    role: Role = "client"

    def __init__(self, provider: Provider) -> None:
        self.client = Client(
            provider.base_path,
            device=provider.device,
            timeout=provider.timeout,
            connect_timeout=provider.server_startup_timeout,
        )

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :meth:`Client.call`."""
        return self.client.call(endpoint, *args, **kwargs)

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """:meth:`call`, in a thread."""
        return await anyio.to_thread.run_sync(lambda: self.client.call(endpoint, *args, **kwargs))

    def invalidate_call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """See :meth:`Client.invalidate_call_cache`."""
        return self.client.invalidate_call_cache(endpoint, *args, **kwargs)

    def invalidate_endpoint(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""
        return self.client.invalidate_endpoint_cache(endpoint)

    def info(self) -> dict[str, Any]:
        """The server, as far as it can be reached."""
        server = self.client.get_server_info()
        return {"socket_path": self.client.socket_path, "server": server}

    def close(self) -> None:
        """Hang up."""
        self.client.close()


class InProcessRuntime:
    """Every call goes through a core in this process, and gets the live value: the server's, or one of its own."""

    def __init__(self, engine: Engine, device: str) -> None:
        self.server_id = engine.core.server_id
        self._engine = engine
        self._device = device

    def call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`.

        :raises ConfigurationError: on the event loop that endpoints run on, which would wait for itself.
        """
        if self._engine.here():
            raise ConfigurationError(
                f"{endpoint}() was called on the server's event loop, by an async endpoint perhaps: make {endpoint!r} an "
                f"async def and await it, or call it with anyio.to_thread.run_sync"
            )
        with self._pending(endpoint, args, kwargs) as future, self._engine.lend_thread() if CHAIN.get() else nullcontext():
            return self._hand(future.result())

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`Runtime`."""
        with self._pending(endpoint, args, kwargs) as future:
            if self._engine.here():
                return self._hand(await asyncio.wrap_future(future))
            return self._hand(await _waited_for(future))

    @contextmanager
    def _pending(
        self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[concurrent.futures.Future[Delivery]]:
        """A call under way. A caller that is cancelled or interrupted gives it up, and leaves no lease behind."""
        pending = self._engine.call(endpoint, self._lowered(args, kwargs), args, kwargs)
        try:
            yield pending.future
        except BaseException:
            pending.give_up()
            raise

    def _lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        from shared_rpc.codec import lower_arguments

        return lower_arguments(args, kwargs, device_kind(self._device))

    def _hand(self, delivery: Delivery) -> Any:
        if not delivery.managed or delivery.stored is None:
            return delivery.live
        return Handle(
            delivery.live,
            object_id=delivery.stored.object_id,
            server_id=self.server_id,
            generation=delivery.stored.generation,
            issuer=self,
            session=self,
        )

    def invalidate_call(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """See :meth:`Client.invalidate_call_cache`."""
        lowered = self._lowered(args, kwargs)
        return self._engine.ask(lambda core: core.invalidate_call(endpoint, *lowered))

    def invalidate_endpoint(self, endpoint: str) -> int:
        """See :meth:`Client.invalidate_endpoint_cache`."""
        return self._engine.ask(lambda core: core.invalidate_endpoint(endpoint))

    def give_back(self, object_id: str, session: object) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        self._engine.release(object_id)

    def object_info(self, object_id: str) -> dict[str, Any]:
        """See :class:`shared_rpc.handle.Issuer`."""
        return self._engine.ask(lambda core: core.object_info(object_id))

    def ensure_handle_live(self, handle: Handle[Any]) -> None:
        """See :class:`shared_rpc.handle.Issuer`."""
        if handle.released:
            raise StaleHandleError(f"the handle of object {handle.object_id} was released", reason="released")
        try:
            self.object_info(handle.object_id)
        except ConnectionClosed as error:
            raise StaleHandleError(str(error), reason="server_unreachable") from error


class LocalRuntime(InProcessRuntime):
    """A core without a socket: nothing is moved into shared memory, because there is nobody to share it with.

    :param inherited: the runtime of the parent process, where this is a forked child: what its cache held stays cached.
    """

    role: Role = "local"

    def __init__(self, provider: Provider, inherited: Runtime | None = None) -> None:
        executor = InProcessExecutor(provider.endpoints, provider.device_id, shares=False)
        core = Core(provider.registry, executor, provider.device_id)
        if isinstance(inherited, LocalRuntime):
            core.objects.adopt(inherited._engine.core.objects)
        engine = Engine(core, executor, "this provider")
        engine.start()
        super().__init__(engine, provider.device_id)

    @property
    def busy(self) -> bool:
        """Whether a thread still runs an endpoint, perhaps after :meth:`close`."""
        return self._engine.busy

    def info(self) -> dict[str, Any]:
        """How many objects the cache holds."""
        return {"objects": self._engine.ask(lambda core: len(core.objects))}

    def close(self) -> None:
        """Let go of all results; handles that are out keep theirs."""
        self._engine.stop()


class ServerRuntime(InProcessRuntime):
    """The core of a server of this process: what it hands out is what the server's clients map."""

    role: Role = "server"

    def __init__(self, server: Server) -> None:
        super().__init__(server.engine, server.engine.core.device)
        self.server = server

    def info(self) -> dict[str, Any]:
        """The server's own facts."""
        return {"socket_path": self.server.socket_path, "server": self.server.info() if self.server.running else None}

    def close(self) -> None:
        """Stop serving."""
        self.server.stop()


async def _waited_for(future: concurrent.futures.Future[T]) -> T:
    if future.done():
        return future.result()
    # A limiter of its own: those who wait must not use up the threads that whoever they wait for needs.
    return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
