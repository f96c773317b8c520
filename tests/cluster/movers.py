"""Movers of the tests: what carries the bytes, held up, damaged or refused while a file is there."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from shared_rpc.client.exported import RecordBytes
from shared_rpc.cluster.movers import MoverFailed, ObjectStoreMover, Part
from shared_rpc.cluster.nixl_mover import NixlMover

__all__ = ["HeldMover", "HeldNixlMover"]


#: Parts that a file with a number has let through, or damaged, by the file and what was written there: of all movers here.
_counted: Counter[tuple[Path, str]] = Counter()
_lock = threading.Lock()


class _Gates:
    """Files of a node, which begin with its id. One with a number holds up after so many parts, or damages so many."""

    def __init__(self) -> None:
        super().__init__()
        self._node = ray.get_runtime_context().get_node_id()
        self._root = Path(os.environ["SITES"])

    def _hold(self, what: str) -> None:
        if self._is_there(what) and self._first(what, default=False):
            return
        while self._is_there(what):
            (self._root / f"{self._node}-{what}-begun").touch()
            time.sleep(0.005)

    def _is_there(self, what: str) -> bool:
        return (self._root / f"{self._node}-{what}").exists()

    def _first(self, what: str, default: bool) -> bool:
        """Whether a part is one of the first, as many as the file says; ``default`` where it says nothing."""
        path = self._root / f"{self._node}-{what}"
        with _lock, contextlib.suppress(FileNotFoundError):
            if text := path.read_text():
                _counted[path, text] += 1
                return _counted[path, text] <= int(text.split()[0])
        return default


class HeldMover(_Gates, ObjectStoreMover):
    """The object store. ``-give`` and ``-take`` hold up, ``-damage`` changes a byte of what it gives, ``-spoil`` one of what it
    takes, and ``-refuse`` has nothing written."""

    def give(self, record: RecordBytes, part: Part) -> Any:
        """Send a part."""
        self._hold("give")
        given = super().give(record, part)
        if self._is_there("damage") and self._first("damage", default=True):
            _change(given)
        return given

    def take(self, given: Any, room: RecordBytes, part: Part) -> None:
        """Write a part."""
        self._hold("take")
        if self._is_there("refuse"):
            raise OSError("not today")
        if self._is_there("spoil") and self._first("spoil", default=True):
            _change(given)
        super().take(given, room, part)


class HeldNixlMover(_Gates, NixlMover):
    """NIXL. ``-give`` and ``-take`` hold up, ``-damage`` changes a digest, and ``-break`` ends a transfer after a part."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = 0

    def give(self, record: RecordBytes, part: Part) -> Any:
        """Send a ticket."""
        self._hold("give")
        given = super().give(record, part)
        return given._replace(digest=bytes(16)) if self._is_there("damage") else given

    def take(self, given: Any, room: RecordBytes, part: Part) -> None:
        """Read a part."""
        self._hold("take")
        if self._taken and self._is_there("break"):
            raise MoverFailed("not today")
        super().take(given, room, part)
        self._taken += 1


def _change(given: Any) -> None:
    data = bytearray(given.bytes.data)
    data[len(data) // 2] ^= 1
    given.bytes.data = memoryview(data)
