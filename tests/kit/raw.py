"""The protocol without a client: one end of a connection, which sends arbitrary frames."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from shared_rpc import Client
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import tiers as t
from shared_rpc.protocol.catalogue import decode_message, encode_message
from shared_rpc.protocol.frames import Frame, encode_frame
from shared_rpc.protocol.messages import Message
from shared_rpc.protocol.records import SegmentInfo, SegmentRef, StorageEntry, TensorEntry, TensorTable
from shared_rpc.protocol.socket import FrameSocket
from shared_rpc.protocol.values import TensorRef, encode
from tests.kit.feeding import next_frame

T = TypeVar("T")

#: linux/fcntl.h
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_WRITE = 1033, 0x2, 0x8


def frame_of(message: Message, number: int = 1, payload: bytes = b"", fds: int = 0) -> bytes:
    """Return the bytes of a frame that announces ``fds`` descriptors."""
    kind, body = encode_message(message)
    return b"".join(encode_frame(kind, number, body, payload, fds))


def sealed_memory(nbytes: int = 4096, seals: int = F_SEAL_SHRINK) -> int:
    """Make a memfd as a client sends it; the caller closes it."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def tensor_call(
    endpoint: str = "total",
    *,
    storage: tuple[int, ...] = (0, 0, 16),
    dtype: str = "float32",
    segments: Sequence[SegmentRef] = (SegmentInfo("chosen by the client", 4096, "cpu"),),
    **more: Any,
) -> m.Call:
    """Return a call with one tensor of four elements, which lies in a segment; ``more`` are other fields of the message."""
    table = TensorTable(("cpu",), (StorageEntry(*storage),), (TensorEntry(0, dtype, 0, (4,), (1,)),))
    fields = {"args": [encode(TensorRef(0))], "table": msgspec.Raw(msgspec.msgpack.encode(table)), **more}
    return m.Call(endpoint, segments=list(segments), **fields)


def disconnect(client: Client) -> None:
    """Break a client's connection without a message, as the kernel does at the end of its process."""
    assert client._link is not None, "the client is not connected"
    client._link._socket.sock.shutdown(socket.SHUT_RDWR)


class Raw:
    """One end of a connection; the end of a ``with`` block closes it without a message."""

    def __init__(self, end: socket.socket | str, *, hello: bool = True) -> None:
        if isinstance(end, str):
            path, end = end, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                end.connect(path)
            except OSError:
                end.close()
                raise
        end.settimeout(20.0)
        self.sock = end
        self._frames = FrameSocket(end)
        self.welcome = m.Welcome("", "")
        if hello:
            try:
                welcome = self.ask(m.Hello())
                assert isinstance(welcome, m.Welcome), welcome
            except BaseException:
                self._frames.close()
                raise
            self.welcome = welcome

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send raw bytes, with descriptors at the first of them. Errors of a closed connection are ignored."""
        with suppress(BrokenPipeError, ConnectionResetError):
            if fds:
                sent = socket.send_fds(self.sock, [data], list(fds))
                data = data[sent:]
            self.sock.sendall(data)

    def say(self, message: Message, number: int = 1, payload: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send a well-formed frame."""
        self.send(frame_of(message, number, payload, len(fds)), fds)

    def hear_frame(self) -> Frame:
        """Receive the next frame, whose descriptors the caller owns."""
        while (frame := next_frame(self._frames)) is None:
            self._frames.receive()
        return frame

    def hear(self, number: int | None = None) -> Message:
        """Receive the next message, or the next with that request id; its descriptors are closed."""
        while True:
            frame = self.hear_frame()
            frame.close()
            if number is None or frame.request_id == number:
                return decode_message(frame)

    def ask(self, message: Message, number: int = 1, payload: bytes = b"", fds: Sequence[int] = ()) -> Message:
        """Send a message, and receive its answer."""
        self.say(message, number, payload, fds)
        return self.hear(number)

    def query(self, message: m.Query[T], number: int = 1) -> T:
        """Send a query, and return the value of its answer."""
        answer = self.ask(message, number)
        assert isinstance(answer, m.Answer), answer
        return message.read(answer)

    @contextmanager
    def result(self, message: Message) -> Iterator[tuple[m.Result, list[int]]]:
        """Send a request; yield its result with the descriptors, which are closed after the block."""
        self.say(message)
        with closing(self.hear_frame()) as frame:
            reply = decode_message(frame)
            assert isinstance(reply, m.Result), reply
            yield reply, frame.fds

    def hear_end(self) -> None:
        """Read until the other side disconnects."""
        with suppress(ConnectionError):
            while self.sock.recv(1 << 16):
                continue

    def close(self) -> None:
        """Disconnect."""
        self._frames.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HoldingSession(Raw):
    """A session that acquires, suspends and resumes leases on objects; it maps nothing."""

    def __init__(self, socket_path: str, seconds: float = 60.0) -> None:
        super().__init__(socket_path)
        self.sock.settimeout(seconds)

    def hold(self, object_id: str) -> None:
        """Acquire a lease, by a request that restores nothing."""
        assert self.ask(m.Hold([object_id])) == m.Held([object_id])

    def suspend(self, object_id: str) -> None:
        """Suspend the lease on an object."""
        assert self.ask(t.Suspend([object_id])) == m.Answer.of(1)

    def resume(self, object_id: str) -> set[int]:
        """Resume an object, which is in host memory; return its distinct bytes."""
        self.say(t.Resume(object_id))
        with closing(self.hear_frame()) as frame:
            reply = decode_message(frame)
            assert isinstance(reply, t.Resumed), reply
            return {byte for fd in frame.fds for byte in os.pread(fd, os.fstat(fd).st_size, 0)[:: mmap.PAGESIZE]}
