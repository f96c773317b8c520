"""The role ``spawn``: a client that starts a server where none is, once for all who want it."""

from shared_rpc.spawn.runtime import SpawnRuntime

__all__ = ["SpawnRuntime"]
