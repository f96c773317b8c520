"""Memo of an agent: which of its broker's objects is which version.

It is a file beside the broker's socket. The broker outlives its agent and Ray; without the memo a new agent would take equal
objects of two nodes for different ones, and have one of them sent again.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from shared_rpc.errors import ConfigurationError
from shared_rpc.protocol.own_files import open_own
from shared_rpc_ray.messages import Version

#: Bytes of a memo at most.
_LIMIT = 16 << 20


def read_memo(socket: str) -> dict[str, Version]:
    """Return the versions of a broker's objects, by their ids; none if the memo cannot be read."""
    with suppress(OSError, ConfigurationError, msgspec.DecodeError):
        descriptor = open_own(f"{socket}.cluster", os.O_RDWR)
        with open(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(_LIMIT) or b"{}", type=dict[str, Version])
    return {}


def write_memo(socket: str, versions: dict[str, Version]) -> None:
    """Replace the memo, if it can be written."""
    path = f"{socket}.cluster"
    with suppress(OSError, ConfigurationError):
        with open(open_own(f"{path}~", os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(msgspec.json.encode(versions))
        os.replace(f"{path}~", path)
