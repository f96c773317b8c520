"""Movers of the tests: what carries the bytes, held up, damaged or refused while a file is there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray

from shared_rpc.client.exported import RecordBytes
from shared_rpc.cluster.movers import ObjectStoreMover, Part

__all__ = ["HeldMover"]


class HeldMover(ObjectStoreMover):
    """The object store. Files of a node begin with its id: ``-give`` and ``-take`` hold up, ``-damage`` changes
    a byte, and ``-refuse`` has nothing written."""

    def __init__(self) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        self._root = Path(os.environ["SITES"])

    def give(self, record: RecordBytes, part: Part) -> Any:
        """Send a part."""
        self._hold("give")
        given = super().give(record, part)
        if (self._root / f"{self._node}-damage").exists():
            data = bytearray(given.bytes.data)
            data[len(data) // 2] ^= 1
            given.bytes.data = memoryview(data)
        return given

    def take(self, given: Any, room: RecordBytes, part: Part) -> None:
        """Write a part."""
        self._hold("take")
        if (self._root / f"{self._node}-refuse").exists():
            raise OSError("not today")
        super().take(given, room, part)

    def _hold(self, what: str) -> None:
        gate = self._root / f"{self._node}-{what}"
        while gate.exists():
            (self._root / f"{self._node}-{what}-begun").touch()
            time.sleep(0.005)
