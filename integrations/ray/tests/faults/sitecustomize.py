"""Faults of transfers in the agents of the tests, which have this folder in PYTHONPATH: parts are held up, damaged or refused.

Files of a folder say which, and begin with the id of a node. ``-give`` and ``-take`` hold parts up, ``-damage`` changes a byte
of those that are sent, ``-refuse`` has none written and no object invalidated. One with a number holds up after so many parts,
or damages so many.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

_counted: dict[str, itertools.count[int]] = {}


def _path(what: str) -> Path:
    import ray

    return Path(os.environ["SITES"]) / f"{ray.get_runtime_context().get_node_id()}-{what}"


def _is_first(path: Path, otherwise: bool) -> bool:
    """Whether a part is one of the first, as many as the file says; each file has a number of its own."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return otherwise
    return not text or next(_counted.setdefault(f"{path} {text}", itertools.count())) < int(text.split()[0])


def _hold(what: str) -> None:
    path = _path(what)
    if path.exists() and path.read_text() and _is_first(path, True):
        return
    while path.exists():
        path.with_name(f"{path.name}-begun").touch()
        time.sleep(0.005)


def _patch() -> None:
    from shared_rpc.errors import ClusterError
    from shared_rpc.operations.async_client import AsyncClient
    from shared_rpc_ray import transfer

    put, take, invalidate = transfer.Sending._put, transfer.take, AsyncClient.invalidate_object

    def held_put(self: transfer.Sending, number: int) -> Any:
        _hold("give")
        return put(self, number)

    def held_take(given: Any, room: Any, part: transfer.Part, mover: str) -> bytes:
        _hold("take")
        if _path("refuse").exists():
            raise OSError("not today")
        return take(given, room, part, mover)

    async def refused(self: AsyncClient, object_id: str) -> int:
        if _path("refuse").exists():
            raise ClusterError("not today")
        return await invalidate(self, object_id)

    def damaged(self: transfer._Bytes, data: Any) -> None:
        if _is_first(_path("damage"), False):  # its digest was computed before
            data = bytearray(data)
            data[len(data) // 2] ^= 1
        begin(self, data)

    begin = transfer._Bytes.__init__
    transfer.Sending._put, transfer.take = held_put, held_take  # type: ignore[method-assign]
    transfer._Bytes.__init__ = damaged  # type: ignore[method-assign]
    AsyncClient.invalidate_object = refused  # type: ignore[method-assign, assignment]


class _Finder:
    """Patches the transfers before the agent's module is imported."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Find nothing."""
        if name == "shared_rpc_ray.agent":
            sys.meta_path.remove(self)
            _patch()


if "SITES" in os.environ:
    sys.meta_path.insert(0, _Finder())
