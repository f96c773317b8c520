"""Messages to a zygote and its first answer: JSON behind its length, descriptors with the first bytes.

They stay on this host and in this version of the package: a zygote serves no other, see :mod:`shared_rpc.scripts.key`.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

__all__ = ["FDS", "GREETING", "Incoming", "Lost", "packed", "parts"]

#: Descriptors of one sendmsg(2); the kernel takes 253 (SCM_MAX_FD).
FDS = 200
#: Bytes of the longest message: what execve(2) takes is less.
_LIMIT = 1 << 25
_LENGTH = 4


class Lost(Exception):
    """A message that did not come whole."""


def packed(message: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    data = json.dumps(message).encode()
    return len(data).to_bytes(_LENGTH, "big") + data


def parts(data: bytes, fds: list[int]) -> list[tuple[bytes, list[int]]]:
    """What to send: bytes, and the descriptors that go with the first of them."""
    cut = []
    while len(fds) > FDS:
        cut.append((data[:1], fds[:FDS]))
        data, fds = data[1:], fds[FDS:]
    return [*cut, (data, fds)]


#: The first message of a zygote, to each who connects. Who has not had it sends no descriptors: those on their way to a process
#: that is stopped are open as long as it is.
GREETING = packed({"greeting": True})


class Incoming:
    """A message that is on its way, and the descriptors that have come with it, which this owns until they are taken."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: list[int] = []

    def receive(self, sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
        """Take in what is there: the message and its descriptors when they are complete.

        :raises Lost: if the other side hung up, or not all that it sent could be taken.
        :raises BlockingIOError: if there is nothing.
        """
        data, ancillary, flags, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds += fds
        if flags & socket.MSG_CTRUNC:
            raise Lost("file descriptors were lost on the way: too many are open (RLIMIT_NOFILE, ulimit -n)")
        if not data:
            raise Lost("the other side hung up")
        self._buffer += data
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if length > _LIMIT:
            raise Lost(f"a message of {length} bytes; at most {_LIMIT} are taken")
        if len(self._buffer) < _LENGTH + length:
            return None
        message = json.loads(self._buffer[_LENGTH : _LENGTH + length])
        del self._buffer[: _LENGTH + length]
        if not isinstance(message, dict):
            raise Lost("what came is no message")
        taken, self._fds = self._fds, []
        return message, taken

    def close(self) -> None:
        """Close what was not taken."""
        while self._fds:
            os.close(self._fds.pop())
