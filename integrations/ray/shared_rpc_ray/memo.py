"""Memo of an agent: which of its broker's objects is which version.

It is a file beside the broker's socket. The broker outlives its agent and Ray; without the memo a new agent would take equal
objects of two nodes for different ones, and have one of them sent again.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

import msgspec

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.own_files import open_own
from shared_rpc_ray.messages import Version

__all__ = ["Memo"]

#: Bytes of a memo at most.
_LIMIT = 16 << 20


class Memo:
    """The versions of a broker's objects, by their ids.

    :param socket: the path of the broker's socket.
    """

    def __init__(self, socket: str) -> None:
        self._path = f"{socket}.cluster"
        self.versions: dict[str, Version] = {}
        # A memo that cannot be read is as good as none.
        with suppress(OSError, ConfigurationError, msgspec.DecodeError):
            with open(open_own(self._path, os.O_RDWR), "rb") as file:
                data = file.read(_LIMIT)
            if data:
                self.versions = msgspec.json.decode(data, type=dict[str, Version])

    def note(self, object_id: str, version: Version) -> None:
        """Note the version of an object."""
        self.versions[object_id] = version
        self._write()

    def keep_only(self, object_ids: Collection[str]) -> None:
        """Forget all other objects."""
        if gone := self.versions.keys() - set(object_ids):
            for object_id in gone:
                del self.versions[object_id]
            self._write()

    def _write(self) -> None:
        with suppress(OSError, ConfigurationError):
            with open(open_own(f"{self._path}~", os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(msgspec.json.encode(self.versions))
            os.replace(f"{self._path}~", self._path)
