"""Frames: bytes and descriptors in, frames out. No I/O.

::

    offset  size  field
    0       4     magic, b"sRPC"
    4       1     protocol version
    5       1     message kind
    6       2     number of file descriptors
        8       4     request id, chosen by the requester; a reply carries the same
    12      4     bytes of the body (MessagePack)
    16      8     bytes of the payload (opaque)
    24            body, payload

All integers are big-endian. The descriptors of a frame travel with its first bytes (SCM_RIGHTS), and the kernel
may deliver them together with bytes of an earlier frame; their order is that of the frames, so the count in the
header assigns them.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from typing import Any, NoReturn

import msgspec

from shared_rpc.errors import ProtocolError
from shared_rpc.protocol.catalogue import VERSION

MAGIC = b"sRPC"
_HEADER = struct.Struct("!4sBBHIIQ")
HEADER_SIZE = _HEADER.size

#: SCM_MAX_FD of the kernel (include/net/scm.h): the limit of one sendmsg(2).
FDS_PER_MESSAGE = 253

#: Maximum bytes of a payload that is joined to the header.
_JOINED = 64 * 1024

#: Maximum descriptors of one frame: over 1,000 segments of 1 GiB or more.
MAX_FDS = 4 * FDS_PER_MESSAGE


class Limits(msgspec.Struct, frozen=True):
    """Limits of a frame, in bytes. Checked on the header, before anything is buffered, and by the sender.

    A decoded body of empty lists would take 64 times its size, so messages limit their lists. A table of 100,000 tensors has
    about 5 MiB.

    :param fds: maximum number of descriptors.
    :param files: True if these may be files that have a path, outside of ``/dev``.
    """

    body: int = 16 << 20
    payload: int = 512 << 20
    fds: int = MAX_FDS
    files: bool = True


_LIMITS = Limits()
#: Limits of the first frame of a connection, whose sender is not known yet.
HELLO = Limits(body=64 << 10, payload=0, fds=0, files=False)
#: Limits of a client's later frames. It has no reason to send a file: the server of a file system in user space determines how
#: long its closing takes, also in a process that is just being started.
CLIENT = Limits(files=False)


def close_all(fds: list[int]) -> None:
    """Close descriptors, removing each from the list."""
    while fds:
        os.close(fds.pop())


class Frame(msgspec.Struct):
    """One message. The frame owns its descriptors until a receiver removes them from the list.

    ``known``: the owners of descriptors that earlier frames brought, by the numbers of the message's segments.
    """

    kind: int
    request_id: int
    body: bytes
    payload: bytes = b""
    fds: list[int] = msgspec.field(default_factory=list)
    known: dict[int, Any] = msgspec.field(default_factory=dict)

    def detach_fds(self) -> list[int]:
        """Return the descriptors, with ownership."""
        fds, self.fds = self.fds, []
        return fds

    def close(self) -> None:
        """Close the remaining descriptors."""
        close_all(self.fds)


def encode_frame(kind: int, request_id: int, body: bytes, payload: bytes = b"", fds: int = 0) -> list[bytes]:
    """Return the buffers of a frame, to be sent in order; ``fds`` is its number of descriptors.

    :raises ProtocolError: if the peer would refuse it: too many descriptors or bytes. The connection stays usable.
    """
    if fds > MAX_FDS:
        raise ProtocolError(f"a frame with {fds} file descriptors; the limit is {MAX_FDS}")
    if len(body) > _LIMITS.body or len(payload) > _LIMITS.payload:
        raise ProtocolError(
            f"a frame of {len(body)} + {len(payload)} bytes; the limits are {_LIMITS.body} + {_LIMITS.payload}: "
            f"large data travels as tensors"
        )
    header = _HEADER.pack(MAGIC, VERSION, kind, fds, request_id, len(body), len(payload))
    # One write and one read for a small frame; a large payload is not copied again.
    return [header + body + payload] if len(payload) <= _JOINED else [header + body, payload]


class FrameDecoder:
    """Decoder of frames from received pieces of any size.

    A violation raises :class:`ProtocolError` and ends the stream: nothing after it can be trusted.

    :param limits: limits of the next headers, which can be replaced.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or _LIMITS
        #: Received bytes of incomplete or unparsed frames.
        self.partial = bytearray()
        #: Received descriptors of incomplete frames.
        self.fds: list[int] = []
        #: Complete frames, until the receiver takes them.
        self.frames: deque[Frame] = deque()
        self._header: tuple[int, int, int, int, int] | None = None

    def check_fds(self) -> None:
        """Refuse descriptors that no frame can have announced."""
        if len(self.fds) > 2 * self.limits.fds:
            raise ProtocolError(f"received {len(self.fds)} file descriptors for a frame of at most {self.limits.fds}")

    def ready(self) -> bool:
        """Return True if a complete frame is among :attr:`frames`.

        :raises ProtocolError: on a wrong magic or version, a size over the limits, or descriptors that do not match.
        """
        if self.frames:
            return True
        partial = self.partial
        if self._header is None:
            if len(partial) < HEADER_SIZE:
                if partial:
                    self._check_beginning()
                return False
            magic, version, kind, count, request_id, body_size, payload_size = _HEADER.unpack_from(partial)
            if (
                magic != MAGIC
                or version != VERSION
                or count > self.limits.fds
                or body_size > self.limits.body
                or payload_size > self.limits.payload
            ):
                self._refuse_header(magic, version, count, body_size, payload_size)
            self._header = kind, count, request_id, body_size, payload_size
        kind, count, request_id, body_size, payload_size = self._header
        end = HEADER_SIZE + body_size + payload_size
        here = len(self.fds)
        if len(partial) < end:
            if here > count:
                raise ProtocolError(f"received {here} file descriptors with a frame that announced {count}")
            return False
        if here < count or (here > count and len(partial) == end):
            raise ProtocolError(f"received {here} file descriptors with a frame that announced {count}")
        # A view kept by an exception's traceback would prevent the buffer from growing.
        with memoryview(partial) as view:
            body, payload = bytes(view[HEADER_SIZE : end - payload_size]), bytes(view[end - payload_size : end])
        frame = Frame(kind, request_id, body, payload, self.fds[:count])
        # Before the frame is added: a descriptor has one owner, also if this is interrupted.
        del self.fds[:count], partial[:end]
        self._header = None
        self.frames.append(frame)
        return True

    def _check_beginning(self) -> None:
        """Refuse bytes that do not begin a header, without waiting for more."""
        known = min(len(self.partial), len(MAGIC))
        if self.partial[:known] != MAGIC[:known]:
            raise ProtocolError(f"not a shared_rpc frame: it begins with {bytes(self.partial[:known])!r}")

    def _refuse_header(self, magic: bytes, version: int, count: int, body: int, payload: int) -> NoReturn:
        if magic != MAGIC:
            raise ProtocolError(f"not a shared_rpc frame: it begins with {magic!r}")
        if version != VERSION:
            raise ProtocolError(
                f"the other side speaks protocol {version} and this one {VERSION}: use the same release of shared-rpc on both"
            )
        if count > self.limits.fds:
            raise ProtocolError(f"a frame announces {count} file descriptors; the limit is {self.limits.fds}")
        raise ProtocolError(
            f"a frame announces {body} + {payload} bytes; the limits are {self.limits.body} + {self.limits.payload}"
        )

    def close(self) -> None:
        """Close the remaining descriptors."""
        for frame in self.frames:
            frame.close()
        close_all(self.fds)
        self.partial.clear()

    def detach_fds(self) -> list[int]:
        """Return the descriptors of all frames not yet taken, with ownership."""
        detached, self.fds = self.fds, []
        for frame in self.frames:
            detached += frame.detach_fds()
        return detached
