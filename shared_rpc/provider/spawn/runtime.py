"""The runtime of the role ``spawn``."""

from __future__ import annotations

import os
from collections.abc import Callable

from shared_rpc.client.starting import ServerStarter, log_path
from shared_rpc.protocol.infos import RuntimeInfo
from shared_rpc.provider.runtime import ClientRuntime, ClientSettings
from shared_rpc.settings import Role, ServeOptions


class SpawnRuntime(ClientRuntime):
    """A client that starts a server if none listens, whenever it connects.

    :param target: returns the app to serve, on demand: :func:`~shared_rpc.provider.spawn.target.target_of`.
    :param idle_exit: idle seconds after which that server ends; None for never.
    :param preload: True if its workers may be forks.
    :param cluster: the cluster that it joins; None for that of the environment.
    """

    role: Role = "spawn"

    def __init__(
        self,
        settings: ClientSettings,
        target: Callable[[], str],
        idle_exit: float | None,
        preload: bool,
        cluster: str | None = None,
    ) -> None:
        super().__init__(settings)
        # Those of this process: settings made after importing the provider are not in the file.
        options = ServeOptions(
            base_path=None if settings.base_path is None else os.fspath(settings.base_path),
            devices=() if settings.device == "auto" else (settings.device,),
            idle_exit=idle_exit,
            preload=preload,
            cluster=cluster,
        )
        self.operations._summon = ServerStarter(target, options)

    def describe(self, info: RuntimeInfo) -> None:
        """Add the server's own description, and the log of a started server."""
        super().describe(info)
        info["log"] = log_path(self.operations.socket_path)
