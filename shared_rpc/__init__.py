"""Share GPU models between the processes of a host: one copy in memory, attached in milliseconds.

Importing this package configures nothing and imports no torch; every public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_rpc import errors
    from shared_rpc.client.exported import AsyncExportedRecord, ExportedRecord, RecordBytes
    from shared_rpc.client.handle import AsyncHandle, Handle
    from shared_rpc.client.subscriptions import Subscription
    from shared_rpc.context import cancelled, progress, raise_if_cancelled
    from shared_rpc.extras.materialize import materialize
    from shared_rpc.memory.pool import PoolOptions
    from shared_rpc.operations.async_client import AsyncClient
    from shared_rpc.operations.client import Client
    from shared_rpc.operations.sources import AsyncSource, Source
    from shared_rpc.protocol.exported import RecordHeader
    from shared_rpc.protocol.generations import Generation
    from shared_rpc.protocol.infos import (
        ClusterStatus,
        DeviceInfo,
        EndpointInfo,
        EndpointStatistics,
        HolderInfo,
        ListedObjectInfo,
        MoveInfo,
        ObjectInfo,
        ReloadInfo,
        RunInfo,
        RuntimeInfo,
        ServerInfo,
        SessionInfo,
        SourceInfo,
        StopInfo,
    )
    from shared_rpc.protocol.sources import Miss
    from shared_rpc.protocol.tasks import Progress, TaskInfo, TaskStatus
    from shared_rpc.protocol.ticket import Ticket
    from shared_rpc.provider.provider import Provider, SharedFunction
    from shared_rpc.server.server import Server

__all__ = [
    "AsyncClient",
    "AsyncExportedRecord",
    "AsyncHandle",
    "AsyncSource",
    "Client",
    "ClusterStatus",
    "DeviceInfo",
    "EndpointInfo",
    "EndpointStatistics",
    "ExportedRecord",
    "Generation",
    "Handle",
    "HolderInfo",
    "ListedObjectInfo",
    "Miss",
    "MoveInfo",
    "ObjectInfo",
    "PoolOptions",
    "Progress",
    "Provider",
    "RecordBytes",
    "RecordHeader",
    "ReloadInfo",
    "RunInfo",
    "RuntimeInfo",
    "Server",
    "ServerInfo",
    "SessionInfo",
    "SharedFunction",
    "Source",
    "SourceInfo",
    "StopInfo",
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

#: The public names of each module.
_NAMES = {
    "client.subscriptions": "Subscription",
    "context": "cancelled progress raise_if_cancelled",
    "extras.materialize": "materialize",
    "client.exported": "AsyncExportedRecord ExportedRecord RecordBytes",
    "client.handle": "AsyncHandle Handle",
    "memory.pool": "PoolOptions",
    "operations.async_client": "AsyncClient",
    "operations.client": "Client",
    "operations.sources": "AsyncSource Source",
    "protocol.exported": "RecordHeader",
    "protocol.generations": "Generation",
    "protocol.infos": "ClusterStatus DeviceInfo EndpointInfo EndpointStatistics HolderInfo ListedObjectInfo MoveInfo"
    " ObjectInfo ReloadInfo RunInfo RuntimeInfo ServerInfo SessionInfo SourceInfo StopInfo",
    "protocol.sources": "Miss",
    "protocol.tasks": "Progress TaskInfo TaskStatus",
    "protocol.ticket": "Ticket",
    "provider.provider": "Provider SharedFunction",
    "server.server": "Server",
}
_HOMES = {name: f"shared_rpc.{home}" for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("shared_rpc.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shared_rpc.lifecycle import collector

    with collector.paused():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
