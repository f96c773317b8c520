"""The role ``spawn``: a client that starts a server if none listens, once for all processes that need one."""

from shared_rpc.provider.spawn.runtime import SpawnRuntime
from shared_rpc.provider.spawn.target import target_of

__all__ = ["SpawnRuntime", "target_of"]
