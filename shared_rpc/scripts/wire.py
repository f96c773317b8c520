"""Messages to a zygote of scripts, and its answers: JSON in frames, see :mod:`shared_rpc.zygote.framing`.

They stay on this host and in this version of the package: a zygote serves no other, see :mod:`shared_rpc.scripts.key`.
"""

from __future__ import annotations

import json
from typing import Any

from shared_rpc.zygote.framing import Lost, framed

__all__ = ["GREETING", "packed", "parts", "unpacked"]

#: Descriptors of one sendmsg(2); the kernel's limit is 253 (SCM_MAX_FD).
_FDS = 200


def packed(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message."""
    return framed(json.dumps(message).encode())


def parts(data: bytes, fds: list[int]) -> list[tuple[bytes, list[int]]]:
    """Return the bytes to send, and the descriptors for the first of them."""
    cut = []
    while len(fds) > _FDS:
        cut.append((data[:1], fds[:_FDS]))
        data, fds = data[1:], fds[_FDS:]
    return [*cut, (data, fds)]


def unpacked(data: bytes) -> dict[str, Any]:
    """Return the message of a frame.

    :raises Lost, ValueError: if it is none.
    """
    try:
        message = json.loads(data)
    except RecursionError:
        message = None
    if not isinstance(message, dict):
        raise Lost("received bytes that are no message")
    return message


#: The first message of a zygote on each connection. A client sends descriptors only after it: descriptors sent to a stopped
#: process stay open for as long as it is stopped.
GREETING = packed({"greeting": True})
