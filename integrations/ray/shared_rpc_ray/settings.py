"""Settings of a server's place in a cluster, from the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from shared_rpc.errors import ConfigurationError
from shared_rpc.settings import CLUSTER_NAME

#: What carries bytes between nodes: Ray's object store, or its tensor transport over NIXL, whose actors import torch.
MOVERS = ("objects", "nixl")

_CLUSTER = "SHARED_TENSOR_CLUSTER"
_NODE = "SHARED_TENSOR_CLUSTER_NODE"
_MOVER = "SHARED_TENSOR_CLUSTER_MOVER"


class ClusterSettings(NamedTuple):
    """Settings of a server that is part of a cluster.

    :param name: of the cluster: several share one Ray cluster without affecting each other.
    :param address: of Ray, as Ray itself reads it.
    :param node: the beginning of the id of this server's Ray node, where the machine has several.
    :param mover: what carries the bytes from node to node: ``objects`` or ``nixl``.
    """

    name: str
    address: str
    node: str
    mover: str


def cluster_settings(environ: Mapping[str, str] | None = None) -> ClusterSettings:
    """Read ``SHARED_TENSOR_CLUSTER``, ``RAY_ADDRESS``, ``SHARED_TENSOR_CLUSTER_NODE`` and ``SHARED_TENSOR_CLUSTER_MOVER``.

    :raises ConfigurationError: for a mover that does not exist.
    """
    environ = os.environ if environ is None else environ
    name, address, node, mover = (environ.get(name, "").strip() for name in (_CLUSTER, "RAY_ADDRESS", _NODE, _MOVER))
    if mover and mover not in MOVERS:
        raise ConfigurationError(f"{_MOVER}={mover!r}: use {' or '.join(MOVERS)}")
    return ClusterSettings(name if CLUSTER_NAME.fullmatch(name) else "default", address, node, mover or MOVERS[0])


def facts_here() -> dict[str, str]:
    """Return the facts of this process's environment, which is the broker's too."""
    facts = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package, name in (("torch", "torch"), ("shared-rpc", "shared_rpc")):
        try:
            facts[name] = version(package)
        except PackageNotFoundError:
            facts[name] = ""
    return facts
