"""Clusters of shared_rpc on Ray: one build for all nodes, whose bytes Ray brings to each, and a tensor transport for actors.

:func:`refresh`, :func:`invalidate` and :func:`status` are for any process on a node of the Ray cluster::

    import shared_rpc_ray

    change = shared_rpc_ray.refresh("load_model", "llama", version=2)
    print(change.nodes, change.left_out)

Importing this package imports no Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_rpc_ray.client import Change, Cluster, invalidate, invalidate_endpoint, refresh, status

__all__ = ["Change", "Cluster", "__version__", "invalidate", "invalidate_endpoint", "refresh", "status"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("shared_rpc_ray.client"), name)
