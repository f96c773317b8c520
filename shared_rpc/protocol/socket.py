"""A connected Unix socket that carries frames with file descriptors, blocking or not.

A plain ``recv`` would silently drop descriptors, so every read is a recvmsg(2). Received descriptors are
close-on-exec. Frames queued for sending refer to the owners of their descriptors, so the caller need not keep them.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from shared_rpc.errors import ConnectionClosed, ProtocolError
from shared_rpc.protocol.catalogue import encode_message
from shared_rpc.protocol.frames import FDS_PER_MESSAGE, FrameDecoder, Limits, close_all, encode_frame
from shared_rpc.protocol.messages import Message

#: Bytes. recvmsg(2) fills a new buffer of this size each time; one of 128 KiB or more comes from mmap, for 15 µs.
_CHUNK = 64 * 1024
_ANCILLARY = socket.CMSG_SPACE(FDS_PER_MESSAGE * 4)
#: Maximum number of buffers in one write; the kernel's limit is 1,024 (IOV_MAX).
_BUFFERS = 256
#: Bytes of one write, and writes of one flush: the deadline is checked in between, however slowly the peer reads.
_WRITE, _WRITES = 128 * 1024, 16
_TIMEVAL = struct.Struct("ll")
# As plain integers: an enum's operators are slow here.
_GET_SEALS = int(fcntl.F_GET_SEALS)
_CLOEXEC, _CTRUNC, _DONTWAIT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC), int(socket.MSG_DONTWAIT)
#: The flags of a write.
_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
#: The arguments of a recvmsg(2), for :func:`itertools.starmap`: one that blocks like the socket, and one that never blocks.
_RECEIVE = ((_CHUNK, _ANCILLARY, _CLOEXEC),)
_RECEIVE_NOW = ((_CHUNK, _ANCILLARY, _CLOEXEC | _DONTWAIT),)


def _fds_of(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors received with a read."""
    return [
        fd
        for level, kind, content in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (fd,) in struct.iter_unpack("i", content[: len(content) - len(content) % 4])
    ]


def _place_of(fd: int) -> str:
    """Return the target of a descriptor, as named by /proc; empty for a memfd.

    This avoids fstat(2), which waits for the server of a file system in user space.
    """
    try:
        fcntl.fcntl(fd, _GET_SEALS)
        return ""
    except OSError:
        return os.readlink(f"/proc/self/fd/{fd}")


def _refuse_strange(fds: Iterable[int], files: bool) -> None:
    """Refuse sockets, because a process that held the other end of its connection would never see its end; and unless ``files``
    also files that have a path.

    :raises ProtocolError: if one of the descriptors is refused; the caller must still close all.
    """
    places = [(fd, _place_of(fd)) for fd in fds]
    for fd in [fd for fd, place in places if place.startswith("socket:")]:
        # Otherwise close(2) waits, for as long as the sender chose, for unread data.
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    for _, place in places:
        if place.startswith("socket:") or (not files and place.startswith("/") and not place.startswith("/dev/")):
            kind = "socket" if place.startswith("socket:") else "file"
            raise ProtocolError(f"received a {kind} where descriptors of memory are expected")


def encoded(message: Message, request_id: int, payload: bytes = b"", owners: Sequence[FdOwner] = ()) -> list[bytes]:
    """Return the buffers of a frame.

    :raises ProtocolError: if there are more descriptors than a frame can carry.
    """
    kind, body = encode_message(message)
    return encode_frame(kind, request_id, body, payload, len(owners))


class FdOwner(Protocol):
    """The owner of an open descriptor, which is not closed while the owner is referenced."""

    number: int


class FrameBuffers(FrameDecoder):
    """Received frames until a receiver takes them, and frames to be sent, with their descriptors. No I/O."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        #: Bytes, and the owners of their descriptors.
        self._outbox: deque[tuple[memoryview, list[FdOwner]]] = deque()
        #: Total bytes queued; and the number of descriptors in the outbox.
        self.queued = 0
        self.queued_fds = 0
        self._removed = 0
        #: The bytes of the latest write, until they are removed from the outbox. They are counted by the expression that writes
        #: them, in C: a signal handler may run before the next one.
        self._wrote: list[int] = []

    @property
    def written(self) -> int:
        """Total bytes written."""
        return self._removed + sum(self._wrote)

    @property
    def unsent(self) -> int:
        """The number of bytes still to be written."""
        return self.queued - self.written

    def queue(
        self,
        message: Message,
        request_id: int,
        payload: bytes = b"",
        owners: Sequence[FdOwner] = (),
    ) -> None:
        """Queue a frame with descriptors.

        :param owners: those of the descriptors, referenced until the frame is written.
        :raises ProtocolError: if there are more descriptors than a frame can carry.
        """
        self.add(encoded(message, request_id, payload, owners), owners)

    def add(self, buffers: Sequence[bytes], owners: Sequence[FdOwner]) -> None:
        """Queue an encoded frame with its descriptors, at once: a signal handler may queue another one."""
        first, begin = memoryview(buffers[0]), 0
        entries: list[tuple[memoryview, list[FdOwner]]] = []
        # One sendmsg(2) takes a limited number of descriptors and needs a byte to carry them.
        while len(owners) - begin > FDS_PER_MESSAGE:
            entries.append((first[:1], [*owners[begin : begin + FDS_PER_MESSAGE]]))
            first, begin = first[1:], begin + FDS_PER_MESSAGE
        entries.append((first, [*owners[begin:]]))
        entries += [(memoryview(buffer), []) for buffer in buffers[1:]]
        size, count = sum(map(len, buffers)), len(owners)
        self.queued += size
        self.queued_fds += count
        self._outbox.extend(entries)

    def _joined(self) -> list[memoryview]:
        """Return the bytes of one write, without descriptors, so that none are sent before their turn."""
        plain = itertools.takewhile(lambda entry: not entry[1], itertools.islice(self._outbox, _BUFFERS))
        joined: list[memoryview] = []
        left = _WRITE
        for data, _ in plain:
            joined.append(data[:left])
            left -= len(joined[-1])
            if left <= 0:
                break
        return joined

    def _remove_written(self) -> None:
        """Remove written bytes, and drop the references to their descriptors."""
        count = self._wrote[0]
        self._removed += count
        del self._wrote[0]
        while count and self._outbox:
            data, owners = self._outbox.popleft()
            self.queued_fds -= len(owners)
            if count < len(data):
                self._outbox.appendleft((data[count:], []))
                return
            count -= len(data)

    def close(self) -> None:
        """Close every received descriptor, and drop the references to queued ones."""
        super().close()
        self._outbox.clear()
        self.queued = self.written


class FrameSocket(FrameBuffers):
    """Owns a socket and its frames.

    On a blocking socket :meth:`receive` blocks like the socket, see :meth:`limit`; on a non-blocking one it does not block.
    Without received data it raises :class:`BlockingIOError`. :meth:`flush` never blocks; it returns False if some output is
    left.
    """

    def __init__(self, sock: socket.socket, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.sock = sock
        #: The result of recvmsg(2), until it is split into bytes and descriptors. It is stored here by the expression that
        #: waits for it, in C, so that a signal handler that raises in this wait loses nothing.
        self._read: list[Any] = []
        self._flushing = False

    def limit(self, seconds: float) -> None:
        """Limit the time that a blocking socket waits for every connect and read. The kernel enforces it (SO_RCVTIMEO,
        SO_SNDTIMEO); after a signal Python restarts the wait, so only short waits always end in time.
        """
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once closed."""
        return self.sock.fileno()

    def receive(self) -> None:
        """Receive available bytes: :meth:`read` and :meth:`take`."""
        self.read()
        self.take()

    def read(self, *, wait: bool = True) -> None:
        """Read available bytes for :meth:`take`, unless it has some.

        :param wait: True if a blocking socket may block.
        :raises ConnectionClosed: if the connection was reset.
        """
        if self._read:
            return
        try:
            self._read.extend(itertools.starmap(self.sock.recvmsg, _RECEIVE if wait else _RECEIVE_NOW))
        except OSError as error:
            if isinstance(error, (BlockingIOError, InterruptedError)) or error.errno is None:
                raise
            raise ConnectionClosed(f"the connection broke: {error}") from error

    def take(self) -> None:
        """Process the bytes that were read.

        :raises ConnectionClosed: at the end of the stream.
        :raises ProtocolError: if descriptors were lost, because this process has too many open or they were too many.
        """
        if not self._read:
            return
        data, ancillary, flags, _ = self._read[0]
        fds = _fds_of(ancillary) if ancillary else []
        self.fds += fds
        self.partial += data
        del self._read[0]
        if fds:
            self.check_fds()
            _refuse_strange(fds, self.limits.files)
        if flags & _CTRUNC:
            raise ProtocolError(
                "file descriptors were lost: this process is at its limit of open files; raise it (RLIMIT_NOFILE, ulimit -n)"
            )
        if not data:
            raise ConnectionClosed("the other side closed the connection")

    def flush(self) -> bool:
        """Write queued bytes; return False if some are left.

        In a signal handler that has interrupted a write, nothing is written: that continues afterwards.

        :raises ConnectionClosed: if the peer has hung up.
        """
        if self._flushing:
            return False
        self._flushing = True
        try:
            return self._write()
        finally:
            self._flushing = False

    def _write(self) -> bool:
        for _ in range(_WRITES):
            if not self._outbox:
                return True
            data, owners = self._outbox[0]
            try:
                if owners:
                    numbers = struct.pack(f"{len(owners)}i", *[owner.number for owner in owners])
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
                    self._wrote.extend(map(self.sock.sendmsg, ([data[:_WRITE]],), (rights,), (_SEND,)))
                elif len(self._outbox) == 1:
                    self._wrote.extend(map(self.sock.send, (data[:_WRITE],), (_SEND,)))
                else:
                    self._wrote.extend(map(self.sock.sendmsg, (self._joined(),), ((),), (_SEND,)))
            except OSError as error:
                if error.errno is None:  # a signal handler's own
                    raise
                if isinstance(error, BlockingIOError):
                    return False
                # Some failures, such as too many descriptors in flight, are invisible in the other direction.
                with suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
                raise ConnectionClosed(f"the connection broke: {error}") from error
            self._remove_written()
        return not self._outbox

    def close(self) -> None:
        """Close the socket and every received descriptor, and drop the references to queued ones."""
        while self._read:
            _, ancillary, _, _ = self._read.pop()
            close_all(_fds_of(ancillary))
        super().close()
        self.sock.close()
