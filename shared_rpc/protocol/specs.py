"""Descriptions of endpoints, without their functions, and of devices."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared_rpc.protocol.records import Access, HostCopy, Tensors


class DeviceSpec(msgspec.Struct, frozen=True, array_like=True):
    """A device on which a server has memory, ``total`` bytes. Segments' sizes are multiples of ``granularity`` bytes."""

    id: str
    kind: str
    name: str
    total: int
    granularity: int


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: ``kind`` as in :class:`inspect.Parameter`. ``default`` represents a default value in a key."""

    name: str
    kind: int
    required: bool
    default: str | None = None


class EndpointSpec(msgspec.Struct, frozen=True):
    """Description of an endpoint: the options of :meth:`Provider.share`, and facts about its function.

    ``idle_ttl`` is in seconds, None for never. ``fingerprint`` changes with the code of the function itself.
    """

    name: str
    parameters: tuple[Parameter, ...] = ()
    execution: Literal["direct", "task"] = "direct"
    concurrency: Literal["parallel", "serialized"] = "parallel"
    cache: bool = True
    cache_format_key: str | None = None
    managed: bool = False
    singleflight: bool = True
    access: Access = "read_write"
    tensors: Tensors = "all"
    idle_ttl: float | None = None
    is_async: bool = False
    doc: str = ""
    fingerprint: str = ""
    host_copy: HostCopy = "on_evict"
    pinned: bool = False
