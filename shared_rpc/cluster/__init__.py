"""One build for the hosts of a cluster: the directory plans, agents beside the brokers carry it out.

:func:`refresh`, :func:`invalidate` and :func:`status` are for any process on a node of the Ray cluster::

    from shared_rpc import cluster

    change = cluster.refresh("load_model", "llama", version=2)
    print(change.nodes, change.left_out)

Importing this package imports no Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_rpc.cluster.client import Change, Cluster, invalidate, invalidate_endpoint, refresh, status

__all__ = ["Change", "Cluster", "invalidate", "invalidate_endpoint", "refresh", "status"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("shared_rpc.cluster.client"), name)
