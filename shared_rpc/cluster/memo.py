"""Memo of an agent: which of its broker's objects is which version, and which builds it has begun.

It is a file beside the broker's socket: an agent that was killed, or a Ray cluster that was restarted, finds the versions of
what the broker still has. Without it, nodes would take equal objects for different ones, and send them to each other anew.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from shared_rpc.cluster.orders import Build, BuildCandidate, Version
from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.own_files import open_own

__all__ = ["Memo"]

#: Bytes of a memo at most.
_LIMIT = 16 << 20


class _Content(msgspec.Struct):
    """Content of the file: versions by object id, and the orders of builds that have begun."""

    versions: dict[str, Version] = {}
    builds: list[Build | BuildCandidate] = []


class Memo:
    """The memo of the agent of a broker.

    :param socket: the path of the broker's socket.
    """

    def __init__(self, socket: str) -> None:
        self._path = f"{socket}.cluster"
        self._content = self._read()
        #: The versions of objects, by their ids.
        self.versions = self._content.versions

    @property
    def builds(self) -> list[Build | BuildCandidate]:
        """The builds that have begun, and not ended as far as is known."""
        return list(self._content.builds)

    def note(self, object_id: str, version: Version) -> None:
        """Note the version of an object."""
        self.versions[object_id] = version
        self._write()

    def begin(self, order: Build | BuildCandidate) -> None:
        """Note a build that begins."""
        self._content.builds.append(order)
        self._write()

    def end(self, order: Build | BuildCandidate) -> None:
        """Forget a build that has ended."""
        if order in self._content.builds:
            self._content.builds.remove(order)
            self._write()

    def keep_only(self, object_ids: set[str]) -> None:
        """Forget the objects that are there no more."""
        gone = self.versions.keys() - object_ids
        for object_id in gone:
            del self.versions[object_id]
        if gone:
            self._write()

    def _read(self) -> _Content:
        # A memo that cannot be read is as good as none: objects are compared by what is known anew.
        with suppress(OSError, ConfigurationError, msgspec.DecodeError):
            fd = open_own(self._path, os.O_RDWR)
            with open(fd, "rb") as file:
                data = file.read(_LIMIT)
            if data:
                return msgspec.json.decode(data, type=_Content)
        return _Content()

    def _write(self) -> None:
        data = msgspec.json.encode(self._content)
        with suppress(OSError, ConfigurationError):
            fd = open_own(f"{self._path}~", os.O_WRONLY | os.O_TRUNC)
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(f"{self._path}~", self._path)
