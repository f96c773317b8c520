"""What carries out a provider's calls: one class for each role, chosen once.

Local and server role answer with live values of this process, through the core that answers a server's clients; the
client role asks a server. The provider does not know which one it has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from shared_rpc.handle import Handle
from shared_rpc.in_process import InProcessRuntime
from shared_rpc.operations.client import Client
from shared_rpc.protocol.tasks import TaskInfo
from shared_rpc.server.core import Core
from shared_rpc.server.engine import Engine
from shared_rpc.server.in_process import InProcessExecutor
from shared_rpc.server.lanes import lanes_of
from shared_rpc.settings import Role

if TYPE_CHECKING:
    import torch

    from shared_rpc.client.subscriptions import Subscription
    from shared_rpc.handle import Handle
    from shared_rpc.protocol.generations import Generation
    from shared_rpc.protocol.ticket import Ticket
    from shared_rpc.provider import Provider
    from shared_rpc.server.server import Server

__all__ = ["BufferCalls", "ClientRuntime", "GenerationCalls", "LocalRuntime", "Runtime", "ServerRuntime", "TaskCalls"]

T = TypeVar("T")


class TaskCalls(Protocol):
    """What a role does with tasks; see :class:`shared_rpc.Client` for each of them."""

    def submit(self, endpoint: str, /, *args: Any, **kwargs: Any) -> str:
        """See :meth:`Client.submit`."""

    def wait_for_task(
        self, task_id: str, timeout: float | None = None, callback: Callable[[TaskInfo], object] | None = None
    ) -> Any:
        """See :meth:`Client.wait_for_task`."""

    def get_task_status(self, task_id: str) -> TaskInfo:
        """See :meth:`Client.get_task_status`."""

    def get_task_result(self, task_id: str) -> Any:
        """See :meth:`Client.get_task_result`."""

    def cancel_task(self, task_id: str) -> bool:
        """See :meth:`Client.cancel_task`."""

    def list_tasks(self, status: str | None = None) -> list[TaskInfo]:
        """See :meth:`Client.list_tasks`."""


class BufferCalls(Protocol):
    """What a role does with raw buffers; see :class:`shared_rpc.Client` for each of them."""

    def create_buffer(
        self,
        shape_or_nbytes: int | Sequence[int],
        dtype: torch.dtype | str = "uint8",
        device: torch.device | str | None = None,
        *,
        zero: bool = False,
        ttl: float | None = None,
        max_accesses: int | None = None,
        keep: bool = False,
    ) -> Handle[torch.Tensor]:
        """See :meth:`Client.create_buffer`."""

    def get_buffer(self, buffer_id: str) -> Handle[torch.Tensor]:
        """See :meth:`Client.get_buffer`."""

    def free_buffer(self, buffer: Handle[Any] | str) -> bool:
        """See :meth:`Client.free_buffer`."""

    def list_devices(self) -> list[dict[str, Any]]:
        """See :meth:`Client.list_devices`."""


class GenerationCalls(Protocol):
    """What a role does with generations and revisions; see :class:`shared_rpc.Client` for each of them."""

    def refresh(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Generation:
        """See :meth:`Client.refresh`."""

    def retire(self, target: Handle[Any] | str) -> list[dict[str, Any]]:
        """See :meth:`Client.retire`."""

    def on_refresh(self, callback: Callable[[Generation], object]) -> Subscription:
        """See :meth:`Client.on_refresh`."""

    def update(self, handle: Handle[T], timeout: float | None = None) -> AbstractContextManager[T]:
        """See :meth:`Client.update`."""

    def open_ticket(self, ticket: Ticket | str | os.PathLike[str]) -> Handle[Any]:
        """See :meth:`Client.open_ticket`."""


class Runtime(Protocol):
    """A role at work."""

    role: Role

    @property
    def tasks(self) -> TaskCalls:
        """What concerns tasks."""

    @property
    def buffers(self) -> BufferCalls:
        """What concerns raw buffers."""

    @property
    def generations(self) -> GenerationCalls:
        """What concerns generations and revisions."""

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

    def __init__(self, provider: Provider, socket: str | None = None, make: Callable[..., Client] = Client) -> None:
        self.client = make(
            provider.base_path,
            socket_path=socket,
            device=provider.device,
            timeout=provider.timeout,
            connect_timeout=provider.server_startup_timeout,
            pool=provider.pool,
        )

    @property
    def tasks(self) -> Client:
        """See :class:`Runtime`."""
        return self.client

    @property
    def buffers(self) -> Client:
        """See :class:`Runtime`."""
        return self.client

    @property
    def generations(self) -> Client:
        """See :class:`Runtime`."""
        return self.client

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


class LocalRuntime(InProcessRuntime):
    """A core without a socket: nothing is moved into shared memory, because there is nobody to share it with.

    :param inherited: the runtime of the parent process, where this is a forked child: what its cache held stays cached.
    """

    role: Role = "local"

    def __init__(self, provider: Provider, inherited: Runtime | None = None) -> None:
        lanes = lanes_of()
        executor = InProcessExecutor(provider.endpoints, provider.device_id, lanes, shares=False)
        core = Core(provider.registry, executor, provider.device_id, lanes)
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
        self._unwatch()
        self._engine.stop()


class ServerRuntime(InProcessRuntime):
    """The core of a server of this process: what it hands out is what the server's clients map."""

    role: Role = "server"

    def __init__(self, server: Server) -> None:
        super().__init__(server.engine, server.engine.core.device)
        self.server = server

    @property
    def socket_path(self) -> str:
        """See :class:`shared_rpc.handle.Giver`."""
        return self.server.socket_path

    def info(self) -> dict[str, Any]:
        """The server's own facts."""
        return {"socket_path": self.server.socket_path, "server": self.server.info() if self.server.running else None}

    def close(self) -> None:
        """Stop serving."""
        self._unwatch()
        self.server.stop()
