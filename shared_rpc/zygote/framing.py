"""Frames of a zygote's sockets: bytes behind their length, descriptors with the first of them."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Incoming", "Lost", "framed"]

#: The longest message in bytes: execve(2) takes less.
_LIMIT = 1 << 25
_LENGTH = 4

T = TypeVar("T")


class Lost(Exception):
    """A message that did not come whole."""


def framed(data: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(data).to_bytes(_LENGTH, "big") + data


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
        message = self._decode(bytes(self._buffer[_LENGTH : _LENGTH + length]))
        del self._buffer[: _LENGTH + length]
        return message

    def close(self) -> None:
        """Close the remaining descriptors."""
        while self._fds:
            os.close(self._fds.pop())
