"""Runtimes: one class for each role, which executes a provider's operations.

Local and server role answer with live values of this process, through the handlers of clients' requests; the client role
uses a server. The provider is independent of the choice.
"""

from __future__ import annotations

from typing import Any, Protocol

import anyio
import anyio.to_thread

from shared_rpc.execution.in_process import InProcessExecutor
from shared_rpc.operations.client import Client
from shared_rpc.protocol.infos import RuntimeInfo
from shared_rpc.provider.loopback import LoopbackRuntime
from shared_rpc.server.core import Core
from shared_rpc.server.engine import Engine
from shared_rpc.server.server import App, Server
from shared_rpc.settings import Role


class ClientRuntime:
    """The runtime of a role whose operations run in another process's server.

    :param operations: the client, owned by this object from now on.
    """

    role: Role = "client"

    def __init__(self, operations: Client) -> None:
        self.operations = operations

    async def acall(self, endpoint: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an endpoint in a thread."""
        return await anyio.to_thread.run_sync(lambda: self.operations.call(endpoint, *args, **kwargs))

    def describe(self, info: RuntimeInfo) -> None:
        """Add the server's own description."""
        info["server"] = self.operations.get_server_info()
        info["socket_path"] = self.operations.socket_path

    def close(self) -> None:
        """Disconnect."""
        self.operations.close()


class LocalRuntime(LoopbackRuntime):
    """A core without a socket: nothing is moved into shared memory, because no other process can get it.

    :param inherited: the runtime of the parent process in a forked child: its cached results stay cached.
    """

    role: Role = "local"

    def __init__(self, app: App, inherited: Runtime | None = None) -> None:
        executor = InProcessExecutor(app.endpoints, app.device_id, shares=False)
        core = Core(app.registry, executor, app.device_id)
        if isinstance(inherited, LocalRuntime):
            core.objects.adopt(inherited._engine.core.objects, app.registry.get)
        engine = Engine(core, executor, "this provider")
        engine.start()
        super().__init__(engine, app.device_id)

    @property
    def busy(self) -> bool:
        """True while a thread runs an endpoint, perhaps after :meth:`close`."""
        return self._engine.busy

    def describe(self, info: RuntimeInfo) -> None:
        """Add the number of cached objects."""
        info["objects"] = self._engine.ask(lambda core: len(core.objects))

    def close(self) -> None:
        """Drop all results; handles keep theirs."""
        self._engine.stop()


class ServerRuntime(LoopbackRuntime):
    """The core of a server of this process, whose clients map the same memory."""

    role: Role = "server"

    def __init__(self, server: Server) -> None:
        super().__init__(server.engine, server.engine.core.device)
        self.server = server

    @property
    def socket_path(self) -> str:
        """The path of the server's socket."""
        return self.server.socket_path

    def describe(self, info: RuntimeInfo) -> None:
        """Add the server's own facts, while it runs."""
        info["socket_path"] = self.server.socket_path
        info["server"] = self.server.info() if self.server.running else None

    def close(self) -> None:
        """Stop serving."""
        self.server.stop()


#: A role in operation.
Runtime = ClientRuntime | LocalRuntime | ServerRuntime


class Host(Protocol):
    """The worker of this process."""

    def adopt(self, provider: Any) -> Any:
        """Serve a provider through the broker; return the runtime of the provider's own calls from then on."""


_hosts: list[Host] = []


def set_host(new: Host) -> None:
    """Make this process a worker."""
    _hosts[:] = [new]


def host() -> Host | None:
    """Return the host of this process, if it is a worker."""
    return _hosts[0] if _hosts else None
