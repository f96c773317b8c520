"""The runtime of the role ``spawn``."""

from __future__ import annotations

from collections.abc import Callable

from shared_rpc.protocol.infos import RuntimeInfo
from shared_rpc.provider.runtime import ClientRuntime, ClientSettings
from shared_rpc.provider.spawn.starting import ServerStarter, log_path
from shared_rpc.settings import Role, ServeOptions

__all__ = ["SpawnRuntime"]


class SpawnRuntime(ClientRuntime):
    """A client that starts a server where none listens, whenever it connects.

    :param target: returns the app to serve, when it is needed: :func:`~shared_rpc.provider.spawn.target.target_of`.
    :param idle_exit: seconds without use after which that server ends; None for never.
    :param preload: whether its workers may be forks.
    """

    role: Role = "spawn"

    def __init__(self, settings: ClientSettings, target: Callable[[], str], idle_exit: float | None, preload: bool) -> None:
        super().__init__(settings)
        self.operations._pool.summon = ServerStarter(target, ServeOptions(idle_exit=idle_exit, preload=preload))

    def describe(self, info: RuntimeInfo) -> None:
        """Add the server's own description, and the log of a started server."""
        super().describe(info)
        info["log"] = log_path(self.operations.socket_path)
