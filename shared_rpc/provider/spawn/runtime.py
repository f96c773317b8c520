"""The role ``spawn`` at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared_rpc.provider.runtime import ClientRuntime, ClientSettings
from shared_rpc.provider.spawn.starting import ServerStarter, log_path
from shared_rpc.settings import Role, ServeOptions

__all__ = ["SpawnRuntime"]


class SpawnRuntime(ClientRuntime):
    """A client that starts a server where none listens, whenever it connects.

    :param target: tells the app that is to be served, when it is needed: :func:`~shared_rpc.provider.spawn.target.target_of`.
    :param idle_exit: seconds after which that server ends when nobody uses it; None for never.
    :param preload: whether its workers may be forks.
    """

    role: Role = "spawn"

    def __init__(self, settings: ClientSettings, target: Callable[[], str], idle_exit: float | None, preload: bool) -> None:
        super().__init__(settings)
        self.operations._pool.summon = ServerStarter(target, ServeOptions(idle_exit=idle_exit, preload=preload))

    def info(self) -> dict[str, Any]:
        """See :class:`ClientRuntime`; with ``log``, where a server that was started writes."""
        facts = super().info()
        return facts | {"log": log_path(facts["socket_path"])}
