"""Clusters of shared_rpc on Ray: one build for all nodes, transferred by Ray, and a tensor transport for actors.

:class:`Cluster` is for any process on a node of the Ray cluster::

    from shared_rpc_ray import Cluster

    with Cluster() as cluster:
        for change in cluster.refresh("load_model", "llama"):
            print(change.version, change.nodes, change.left_out)

Importing this package does not import Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_rpc_ray.client import Cluster
    from shared_rpc_ray.messages import Change

__all__ = ["Change", "Cluster", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("shared_rpc_ray.client"), name)
