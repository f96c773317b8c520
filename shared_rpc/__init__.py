"""Share GPU models between the processes of a host: one copy in memory, attached in milliseconds.

Importing this package configures nothing and imports no torch; every public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_rpc import errors
    from shared_rpc.client.subscriptions import Subscription
    from shared_rpc.context import cancelled, progress, raise_if_cancelled
    from shared_rpc.extras.materialize import materialize
    from shared_rpc.handle import AsyncHandle, Handle
    from shared_rpc.memory.pool import PoolOptions
    from shared_rpc.operations.async_client import AsyncClient
    from shared_rpc.operations.client import Client
    from shared_rpc.protocol.generations import Generation
    from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
    from shared_rpc.protocol.ticket import Ticket
    from shared_rpc.provider.provider import Provider, SharedFunction
    from shared_rpc.server.server import Server

__all__ = [
    "AsyncClient",
    "AsyncHandle",
    "Client",
    "Generation",
    "Handle",
    "PoolOptions",
    "Progress",
    "Provider",
    "Server",
    "SharedFunction",
    "Subscription",
    "TaskInfo",
    "TaskStatus",
    "Ticket",
    "__version__",
    "cancelled",
    "errors",
    "materialize",
    "progress",
    "raise_if_cancelled",
]

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "shared_rpc.operations.async_client",
    "AsyncHandle": "shared_rpc.handle",
    "Client": "shared_rpc.operations.client",
    "Generation": "shared_rpc.protocol.generations",
    "Handle": "shared_rpc.handle",
    "PoolOptions": "shared_rpc.memory.pool",
    "Progress": "shared_rpc.protocol.tasks",
    "Provider": "shared_rpc.provider.provider",
    "Server": "shared_rpc.server.server",
    "SharedFunction": "shared_rpc.provider.provider",
    "Subscription": "shared_rpc.client.subscriptions",
    "TaskInfo": "shared_rpc.protocol.tasks",
    "TaskStatus": "shared_rpc.protocol.tasks",
    "Ticket": "shared_rpc.protocol.ticket",
    "cancelled": "shared_rpc.context",
    "materialize": "shared_rpc.extras.materialize",
    "progress": "shared_rpc.context",
    "raise_if_cancelled": "shared_rpc.context",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("shared_rpc.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
