"""Faults of transfers in the agents of the tests, which have this folder in PYTHONPATH: parts are held up, damaged or refused.

Files of a folder say which, and begin with the id of a node. ``-give`` and ``-take`` hold parts up, ``-damage`` changes a byte
of the next one that is sent, ``-refuse`` has none written and no object invalidated.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def _path(what: str) -> Path:
    import ray

    return Path(os.environ["SITES"]) / f"{ray.get_runtime_context().get_node_id()}-{what}"


def _hold(what: str) -> None:
    path = _path(what)
    while path.exists():
        path.with_name(f"{path.name}-begun").touch()
        time.sleep(0.005)


def _patch() -> None:
    from shared_rpc.errors import ClusterError
    from shared_rpc.operations.async_client import AsyncClient
    from shared_rpc_ray import transfer

    put, take = transfer.Sending._put, transfer.take
    invalidate = AsyncClient.invalidate_object

    def held_put(self: transfer.Sending, number: int) -> Any:
        import ray

        _hold("give")
        reference, digest = put(self, number)
        if _path("damage").exists():
            _path("damage").unlink()
            found = ray.get(reference).copy()
            found[len(found) // 2] ^= 1
            reference = ray.put(found)
        return reference, digest

    def held_take(*given: Any) -> bytes:
        _hold("take")
        if _path("refuse").exists():
            raise OSError("not today")
        return take(*given)

    async def refused(self: AsyncClient, object_id: str) -> int:
        if _path("refuse").exists():
            raise ClusterError("not today")
        return await invalidate(self, object_id)

    transfer.Sending._put, transfer.take = held_put, held_take  # type: ignore[method-assign]
    AsyncClient.invalidate_object = refused  # type: ignore[method-assign, assignment]


class _Finder:
    """Patches the transfers before the agent's module is imported."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Find no module."""
        if name == "shared_rpc_ray.agent":
            sys.meta_path.remove(self)
            _patch()


if "SITES" in os.environ:
    sys.meta_path.insert(0, _Finder())
