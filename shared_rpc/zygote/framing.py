"""Messages of a zygote's sockets: JSON behind its length, descriptors with the first bytes.

They stay on this host and in this version of the package. A message is an object with the name of its type, see
:mod:`shared_rpc.zygote.messages`, which a command of ``shared-rpc run`` does not load: a person waits for it.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["GO", "GREETING", "ROOM", "Incoming", "Lost", "framed", "parts", "unpacked"]

#: The longest message in bytes: execve(2) takes less.
_LIMIT = 1 << 25
_LENGTH = 4
#: Descriptors of one sendmsg(2); the kernel's limit is 253 (SCM_MAX_FD).
_FDS = 200
#: The last word in the command line of a process that changes it: a new command line has only the memory of the old one.
ROOM = "x" * 2000
#: The byte by which a client lets a script begin that it was told is ready.
GO = b"!"

T = TypeVar("T")


class Lost(Exception):
    """A message that did not come whole."""


def framed(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message."""
    data = json.dumps(message).encode()
    return len(data).to_bytes(_LENGTH, "big") + data


#: The first message on each connection to a listening zygote. A client sends descriptors only after it: descriptors sent to a
#: stopped process stay open for as long as it is stopped.
GREETING = framed({"type": "Greeting"})


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


def parts(data: bytes, fds: list[int]) -> list[tuple[bytes, list[int]]]:
    """Return the bytes to send, and the descriptors for the first of them."""
    cut = []
    while len(fds) > _FDS:
        cut.append((data[:1], fds[:_FDS]))
        data, fds = data[1:], fds[_FDS:]
    return [*cut, (data, fds)]


class Incoming(Generic[T]):
    """A message that is on its way, and the descriptors that have come with it, which this owns until they are taken.

    :param decode: makes a message of its bytes.
    """

    def __init__(self, decode: Callable[[bytes], T]) -> None:
        self._decode = decode
        self._buffer = bytearray()
        self._fds: list[int] = []

    def receive(self, sock: socket.socket) -> tuple[T, list[int]] | None:
        """Take in available bytes; return the message and its descriptors when they are complete.

        :raises Lost, ValueError: if the other side hung up, or not all that it sent could be taken.
        :raises BlockingIOError: if there is nothing.
        """
        data, ancillary, flags, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds += fds
        if flags & socket.MSG_CTRUNC:
            raise Lost("file descriptors were lost: too many are open in this process (RLIMIT_NOFILE, ulimit -n)")
        if not data:
            raise Lost("the other side hung up")
        message = self.feed(data)
        if message is None:
            return None
        taken, self._fds = self._fds, []
        return message, taken

    def feed(self, data: bytes) -> T | None:
        """Take in received bytes; return the message when it is complete.

        :raises Lost, ValueError: if it is too long, or none.
        """
        self._buffer += data
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if length > _LIMIT:
            raise Lost(f"a message of {length} bytes: the limit is {_LIMIT}")
        if len(self._buffer) < _LENGTH + length:
            return None
        data = bytes(self._buffer[_LENGTH : _LENGTH + length])
        del self._buffer[: _LENGTH + length]
        return self._decode(data)

    def close(self) -> None:
        """Close the remaining descriptors."""
        while self._fds:
            os.close(self._fds.pop())
