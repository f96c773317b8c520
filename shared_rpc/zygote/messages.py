"""Messages between a zygote and the process that uses it: JSON behind its length, descriptors with the first byte."""

from __future__ import annotations

import socket
import struct

import msgspec

__all__ = ["Answer", "Fork", "ForkRefused", "Forked", "Preload", "Ready", "Request", "Step", "Stream", "Unfit"]

#: What a zygote does to get ready: import a module, or change variables of its environment (None removes one).
Step = str | dict[str, str | None]

#: Bytes of the longest message.
_LIMIT = 1 << 24
#: Descriptors of one message; the kernel takes 253 (SCM_MAX_FD).
_FDS = 253


class Preload(msgspec.Struct, tag=True):
    """The first message to a zygote.

    ``own`` are names of modules that it must not have: those of the person's own code. ``folders`` are directories whose
    modules it must not import: files of a person change at any time, and come first where Python looks for modules.
    """

    steps: list[Step]
    own: list[str] = []
    folders: list[str] = []


class Fork(msgspec.Struct, tag=True):
    """A request for a process.

    :param module: run as ``python -m module`` does, with ``words`` as further words of the command line.
    :param fds: the numbers that the descriptors of this message have in the process; 0, 1 and 2 must be among them.
    :param folders: directories that come first where the process looks for modules: none of them may have a module that the
        zygote has from elsewhere.
    """

    module: str
    words: list[str]
    fds: list[int]
    folders: list[str] = []


Request = Preload | Fork


class Ready(msgspec.Struct, tag=True):
    """A zygote that can be forked. ``modules`` are those it has imported; ``dropped`` those that it could not, and why."""

    modules: list[str]
    dropped: dict[str, str]


class Unfit(msgspec.Struct, tag=True):
    """A zygote that must not be forked, and ends. ``module`` is the one whose import was the reason, where one was."""

    why: str
    module: str = ""


class Forked(msgspec.Struct, tag=True):
    """A process that has begun: a child of the one that asked for it, if that is a subreaper, see prctl(2)."""

    pid: int


class ForkRefused(msgspec.Struct, tag=True):
    """A request that cannot be met. ``stale``: nor can any later one, as what was imported is not what there is now."""

    why: str
    stale: bool = False


Answer = Ready | Unfit | Forked | ForkRefused

_requests = msgspec.json.Decoder(Request)
_answers = msgspec.json.Decoder(Answer)


class Stream:
    """A stream socket that carries messages. Calls wait; for an event loop there are :func:`packed` and :meth:`feed`."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    def send(self, message: Request | Answer, fds: list[int] | None = None) -> None:
        """Send a message, and copies of descriptors with it."""
        data = packed(message)
        sent = socket.send_fds(self.socket, [data], fds) if fds else 0
        self.socket.sendall(data[sent:])

    def request(self) -> tuple[Request, list[int]] | None:
        """Wait for a request; it and the descriptors that came with it. None at the end."""
        while (data := self._message()) is None:
            part, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, _FDS)
            self._fds += fds
            if not part:
                return None
            self._buffer += part
        fds, self._fds = self._fds, []
        return _requests.decode(data), fds

    def feed(self, part: bytes) -> Answer | None:
        """Take bytes of an answer; the answer when they are complete."""
        self._buffer += part
        data = self._message()
        return _answers.decode(data) if data is not None else None

    def _message(self) -> bytes | None:
        if len(self._buffer) < 4:
            return None
        (length,) = struct.unpack_from("!I", self._buffer)
        if length > _LIMIT:
            raise ValueError(f"a message of {length} bytes; at most {_LIMIT} are taken")
        if len(self._buffer) < 4 + length:
            return None
        data = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return data


def packed(message: Request | Answer) -> bytes:
    """The bytes of a message."""
    data = msgspec.json.encode(message)
    return struct.pack("!I", len(data)) + data
