"""The role ``spawn`` at work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_rpc.options import ServeOptions
from shared_rpc.runtime import ClientRuntime
from shared_rpc.settings import Role
from shared_rpc.spawn.starting import ServerStarter, log_path
from shared_rpc.spawn.target import target_of

if TYPE_CHECKING:
    from shared_rpc.provider import Provider

__all__ = ["SpawnRuntime"]


class SpawnRuntime(ClientRuntime):
    """A client that starts a server where none listens, whenever it connects.

    :param idle_exit: seconds after which that server ends when nobody uses it; None for never.
    :param preload: whether its workers may be forks.
    """

    role: Role = "spawn"

    def __init__(self, provider: Provider, idle_exit: float | None, preload: bool) -> None:
        super().__init__(provider)
        options = ServeOptions(idle_exit=idle_exit, preload=preload)
        self.client._pool.summon = ServerStarter(lambda: target_of(provider), options)

    def info(self) -> dict[str, Any]:
        """See :class:`ClientRuntime`; with ``log``, where a server that was started writes."""
        facts = super().info()
        return facts | {"log": log_path(facts["socket_path"])}
