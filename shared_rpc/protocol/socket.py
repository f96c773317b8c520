"""A connected Unix socket that carries frames with file descriptors, blocking or not.

A plain ``recv`` would drop descriptors without a word, so every read is a recvmsg(2). Descriptors arrive
close-on-exec. What is queued for sending owns duplicates of its descriptors, so the caller may close its own at once.
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
from shared_rpc.protocol.catalogue import NUMBERS, UNWRITABLE, encode_body, unwritable
from shared_rpc.protocol.frames import FDS_PER_MESSAGE, FrameDecoder, Limits, close_all, encode_frame
from shared_rpc.protocol.messages import Message

#: Bytes. recvmsg(2) fills a new buffer of this size each time; one of 128 KiB or more comes from mmap, for 15 µs.
_CHUNK = 64 * 1024
_ANCILLARY = socket.CMSG_SPACE(FDS_PER_MESSAGE * 4)
#: Buffers of one write; the kernel's limit is 1,024 (IOV_MAX).
_BUFFERS = 256
#: Bytes of one write, and writes of one flush: the deadline is checked in between, however slowly the other side reads.
_WRITE, _WRITES = 128 * 1024, 16
_TIMEVAL = struct.Struct("ll")
# As plain integers: an enum's operators are slow here.
_GET_SEALS = int(fcntl.F_GET_SEALS)
_CLOEXEC, _CTRUNC, _DONTWAIT = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC), int(socket.MSG_DONTWAIT)
#: The flags of a write.
_SEND = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
#: The arguments of a recvmsg(2), for :func:`itertools.starmap`: one that waits as the socket does, and one that does not wait.
_RECEIVE = ((_CHUNK, _ANCILLARY, _CLOEXEC),)
_RECEIVE_NOW = ((_CHUNK, _ANCILLARY, _CLOEXEC | _DONTWAIT),)


def _fds_of(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a read."""
    return [
        fd
        for level, kind, content in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (fd,) in struct.iter_unpack("i", content[: len(content) - len(content) % 4])
    ]


def _place_of(fd: int) -> str:
    """Return what a descriptor is open on, as /proc names it; empty for a memfd.

    That takes no fstat(2), which waits for the server of a file system in user space.
    """
    try:
        fcntl.fcntl(fd, _GET_SEALS)
        return ""
    except OSError:
        return os.readlink(f"/proc/self/fd/{fd}")


def _packed(fds: Sequence[Any]) -> bytes:
    numbers = fds if isinstance(fds[0], int) else [owner.number for owner in fds]
    return struct.pack(f"{len(fds)}i", *numbers)


def _drop(fds: list[Any]) -> None:
    """Close duplicates, and drop the references to owners."""
    if fds and fds[0].__class__ is not int:
        fds.clear()
    else:
        close_all(fds)


def _refuse_strange(fds: Iterable[int], files: bool) -> None:
    """Refuse sockets, because a process that held the other end of its connection would never see its end; and unless ``files``
    also files that have a path.

    :raises ProtocolError: if there is one among the descriptors, which stay the caller's to close.
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


class FdOwner(Protocol):
    """Owner of an open descriptor, which is not closed while anything refers to the owner."""

    number: int


class FrameBuffers:
    """Received frames until a receiver takes them, and frames to be sent, with their descriptors. No I/O."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._decoder = FrameDecoder(limits)
        #: Complete frames that the receiver has not taken; the bytes that may hold more; and see :meth:`FrameDecoder.ready`.
        self.frames = self._decoder.frames
        self.partial = self._decoder.partial
        self.ready = self._decoder.ready
        self.next_frame = self._decoder.next_frame
        #: Received bytes and descriptors, until the decoder has them.
        self._arrived: list[tuple[bytes | memoryview, list[int]]] = []
        #: Bytes, and the descriptors that go with them: duplicates, or owners.
        self._outbox: deque[tuple[memoryview, list[int] | list[FdOwner]]] = deque()
        #: The number of bytes that were written, until they are out of the outbox.
        self._wrote: list[int] = []
        #: Duplicates of descriptors that are being added to the outbox.
        self._duplicates: list[int] = []
        #: Queued bytes and written bytes, since the beginning; and the descriptors in the outbox.
        self.queued = 0
        self.written = 0
        self.queued_fds = 0

    @property
    def unsent(self) -> int:
        """Bytes that wait to be written."""
        return self.queued - self.written

    def feed(self, data: bytes | memoryview, fds: Iterable[int] = ()) -> None:
        """Take in bytes and the descriptors that came with them, which belong to the buffers now."""
        self._arrived += ((data, list(fds)),)
        self._decoder.consume(self._arrived)

    def take_fds(self) -> list[int]:
        """Return the descriptors of all frames that were not taken, which belong to the caller from here on."""
        return self._decoder.detach_fds()

    def limit_frames(self, limits: Limits) -> None:
        """Set the limits of the frames to come."""
        self._decoder.limits = limits

    @property
    def newest_fd(self) -> int:
        """The descriptor of an incomplete frame that came last, -1 for none."""
        return self._decoder.fds[-1] if self._decoder.fds else -1

    @property
    def held_fds(self) -> int:
        """Descriptors of incomplete frames, and of frames that wait to be written."""
        return len(self._decoder.fds) + self.queued_fds

    def queue(
        self,
        message: Message,
        request_id: int,
        payload: bytes = b"",
        fds: Sequence[int] = (),
        owners: Sequence[FdOwner] = (),
    ) -> None:
        """Queue a frame with descriptors, of one kind or the other.

        :param fds: are duplicated.
        :param owners: are referred to until the frame is written: it takes no descriptor of this process to wait.
        :raises ProtocolError: if there are more descriptors than a frame can carry.
        :raises OSError: if this process cannot open more files.
        """
        try:
            kind, body = NUMBERS[type(message)], encode_body(message)
        except UNWRITABLE as error:
            raise unwritable(message, error) from error
        buffers = encode_frame(kind, request_id, body, payload, len(fds) + len(owners))
        first = memoryview(buffers[0])
        rest = [(memoryview(buffer), list[int]()) for buffer in buffers[1:]]
        length = sum(map(len, buffers))
        entries: list[tuple[memoryview, list[Any]]] = []
        if self._duplicates:  # of a frame that was not queued, because a signal handler raised here
            close_all(self._duplicates)
        count = len(fds) + len(owners)
        if count:
            owned: list[Any] = self._duplicates if fds else [*owners]
            try:
                owned.extend(map(os.dup, fds))
            except OSError:
                close_all(owned)
                raise
            # One sendmsg(2) takes a limited number of descriptors and needs a byte to carry them.
            begin = 0
            while len(owned) - begin > FDS_PER_MESSAGE:
                entries.append((first[:1], owned[begin : begin + FDS_PER_MESSAGE]))
                first, begin = first[1:], begin + FDS_PER_MESSAGE
            entries.append((first, owned[begin:]))
        else:
            entries.append((first, []))
        # No call from here on, after which a signal handler could run.
        self._outbox += entries
        self._duplicates = []
        self._outbox += rest
        self.queued += length
        self.queued_fds += count

    def _joined(self) -> list[memoryview]:
        """Return the bytes of one write, which have no descriptors, so that none are sent before their turn."""
        plain = itertools.takewhile(lambda entry: not entry[1], itertools.islice(self._outbox, _BUFFERS))
        joined: list[memoryview] = []
        left = _WRITE
        for data, _ in plain:
            joined.append(data[:left])
            left -= len(joined[-1])
            if left <= 0:
                break
        return joined

    def _note(self) -> None:
        """Forget written bytes, and close the descriptors that went with them."""
        while self._wrote:
            count = self._wrote[0]
            data, fds = self._outbox[0]
            length, held = len(data), len(fds)
            _drop(fds)
            self.queued_fds -= held
            # No call from here on, after which a signal handler could run.
            if length <= count:
                del self._outbox[0]
                self.written += length
                self._wrote[0] = count - length
                if count > length:
                    continue
            else:
                self._outbox[0] = (data[count:], [])
                self.written += count
            del self._wrote[0]

    def close(self) -> None:
        """Close every descriptor that came in or was to go out."""
        for fds in (*(fds for _, fds in self._arrived), *(fds for _, fds in self._outbox), self._duplicates):
            _drop(fds)
        self._decoder.close()
        self._outbox.clear()
        self.queued = self.written


class FrameSocket(FrameBuffers):
    """Owns a socket and its frames.

    Descriptors that a system call returns are stored by the same expression, in C, and go from hand to hand as in
    :class:`FrameDecoder`: a signal handler that raises leaves all of them to :meth:`close`.

    On a blocking socket :meth:`receive` waits as long as it does, see :meth:`limit`; on a non-blocking one it does not wait.
    Where nothing arrived it raises :class:`BlockingIOError`. :meth:`flush` never waits; where not everything was taken it
    returns False.
    """

    def __init__(self, sock: socket.socket, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.sock = sock
        #: The result of recvmsg(2), until it is split into bytes and descriptors.
        self._read: list[Any] = []

    def limit(self, seconds: float) -> None:
        """Limit the time that a blocking socket waits for every connect and read. The kernel keeps it (SO_RCVTIMEO,
        SO_SNDTIMEO); after a signal Python waits again, so only short waits end in time whatever happens.
        """
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once closed."""
        return self.sock.fileno()

    def receive(self) -> None:
        """Take in available bytes: :meth:`read` and :meth:`take`."""
        self.read()
        self.take()

    def read(self, *, wait: bool = True) -> None:
        """Read available bytes, which :meth:`take` takes in.

        :param wait: whether a blocking socket waits.
        :raises ConnectionClosed: if the connection was reset.
        """
        try:
            self._read.extend(itertools.starmap(self.sock.recvmsg, _RECEIVE if wait else _RECEIVE_NOW))
        except OSError as error:
            if isinstance(error, (BlockingIOError, InterruptedError)) or error.errno is None:
                raise
            raise ConnectionClosed(f"the connection broke: {error}") from error

    def take(self) -> None:
        """Take in what was read.

        :raises ConnectionClosed: at the end of the stream.
        :raises ProtocolError: if descriptors were lost, because this process has too many open or they were too many.
        """
        while self._arrived:  # a signal handler has raised here before
            self._decoder.consume(self._arrived)
        while self._read:
            data, ancillary, flags, _ = self._read[0]
            if ancillary:
                self._sort()
                _, fds = self._arrived[0]
                fds = [*fds]
                self._decoder.consume(self._arrived)
                _refuse_strange(fds, self._decoder.limits.files)
            else:
                self.partial += data
                del self._read[0]
            if flags & _CTRUNC:
                raise ProtocolError(
                    "file descriptors were lost: this process is at its limit of open files; raise it (RLIMIT_NOFILE, "
                    "ulimit -n)"
                )
            if not data:
                raise ConnectionClosed("the other side closed the connection")

    def _sort(self) -> None:
        """Take bytes and descriptors out of the first result of recvmsg(2)."""
        data, ancillary, _, _ = self._read[0]
        fds = _fds_of(ancillary) if ancillary else []
        self._arrived += ((data, fds),)
        del self._read[0]

    def flush(self) -> bool:
        """Write queued bytes; False if there are more than one write takes.

        :raises ConnectionClosed: if the other side has hung up.
        """
        if self._wrote:
            self._note()
        for _ in range(_WRITES):
            if not self._outbox:
                return True
            data, fds = self._outbox[0]
            try:
                if fds:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _packed(fds))]
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
                # Some failures, as too many descriptors in flight, are not noticed in the other direction.
                with suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
                raise ConnectionClosed(f"the connection broke: {error}") from error
            self._note()
        return not self._outbox

    def close(self) -> None:
        """Close the socket and every descriptor that came in or was to go out."""
        while self._read:
            self._sort()
        super().close()
        self.sock.close()
