"""Frames from bytes and descriptors in any pieces. The descriptors are real, and are counted."""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_rpc.errors import ConnectError, ProtocolError
from shared_rpc.protocol.catalogue import VERSION
from shared_rpc.protocol.frames import (
    FDS_PER_MESSAGE,
    HEADER_SIZE,
    MAX_FDS,
    Frame,
    FrameDecoder,
    Limits,
    encode_frame,
)
from shared_rpc.zygote import wire
from tests.kit.feeding import feed, new_fd, next_frame, nothing_leaks


@dataclass
class Plan:
    """A frame to be sent; its ``fds`` descriptors are attached to the pieces of it that begin at ``cuts``."""

    kind: int
    request_id: int
    body: bytes
    payload: bytes
    fds: int = 0
    cuts: list[int] = field(default_factory=list)

    def encode(self) -> bytes:
        """Return its bytes."""
        return b"".join(encode_frame(self.kind, self.request_id, self.body, self.payload, self.fds))


plans = st.builds(
    Plan,
    kind=st.integers(0, 255),
    request_id=st.integers(0, 2**32 - 1),
    body=st.binary(max_size=30),
    payload=st.binary(max_size=30),
    fds=st.integers(0, 3),
    cuts=st.lists(st.integers(0, HEADER_SIZE - 1), max_size=2),
)


def file_of(fd: int) -> int:
    """Return a descriptor's file, whatever its number."""
    return os.fstat(fd).st_ino


def header(
    *, magic: bytes = b"sRPC", version: int = VERSION, kind: int = 3, fds: int = 0, body: int = 0, payload: int = 0
) -> bytes:
    """Return a header in the format of the module's docstring."""
    return struct.pack("!4sBBHIIQ", magic, version, kind, fds, 7, body, payload)


@given(st.lists(plans, max_size=5), st.data())
def test_any_chunking_gives_the_same_frames(sent: list[Plan], data: st.DataObject) -> None:
    """Wherever the stream is cut, frames and descriptors are complete and in order."""
    stream, arrivals = b"", []
    for plan in sent:
        # Each sendmsg(2) has its own bytes and descriptors; these arrive with the first of its bytes at the latest.
        starts = sorted(data.draw(st.sampled_from([0, *plan.cuts])) for _ in range(plan.fds))
        arrivals += [len(stream) + start for start in starts]
        stream += plan.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)) | {len(stream)})
    with nothing_leaks():
        fds = [new_fd() for _ in arrivals]
        files = [file_of(fd) for fd in fds]
        decoder, frames, begin = FrameDecoder(), [], 0
        for end in cuts:
            feed(decoder, stream[begin:end], [fd for at, fd in zip(arrivals, fds, strict=True) if begin <= at < end])
            while (frame := next_frame(decoder)) is not None:
                frames.append(frame)
            begin = end
        assert [(f.kind, f.request_id, f.body, f.payload, len(f.fds)) for f in frames] == [
            (p.kind, p.request_id, p.body, p.payload, p.fds) for p in sent
        ]
        assert [file_of(fd) for frame in frames for fd in frame.fds] == files
        assert len(decoder.partial) == 0
        for frame in frames:
            frame.close()
        decoder.close()


def test_the_descriptors_of_a_frame_have_one_owner() -> None:
    """A receiver that takes them closes them; otherwise the frame does, once."""
    with nothing_leaks():
        kept, dropped = Frame(1, 1, b"", fds=[new_fd()]), Frame(1, 1, b"", fds=[new_fd()])
        taken = kept.detach_fds()
        kept.close()
        dropped.close()
        dropped.close()
        assert kept.fds == dropped.fds == []
        os.fstat(taken[0])
        os.close(taken[0])


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (header(magic=b"HTTP"), r"not a shared_rpc frame: it begins with b'HTTP'"),
        (b"HT", r"not a shared_rpc frame: it begins with b'HT'"),
        (header(version=VERSION ^ 1), rf"speaks protocol {VERSION ^ 1} and this one {VERSION}: use the same release"),
        (header(fds=MAX_FDS + 1), rf"announces {MAX_FDS + 1} file descriptors; the limit is {MAX_FDS}"),
        (header(body=101), r"announces 101 \+ 0 bytes; the limits are 100 \+ 200"),
        (header(payload=201), r"announces 0 \+ 201 bytes; the limits are 100 \+ 200"),
        (header(body=2**32 - 1, payload=2**64 - 1), r"announces 4294967295 \+ 18446744073709551615 bytes"),
    ],
)
def test_invalid_headers_are_refused_at_once(first: bytes, message: str) -> None:
    """Before the announced data arrives; later bytes are ignored, and descriptors are closed."""
    with nothing_leaks():
        decoder = FrameDecoder(Limits(body=100, payload=200))
        feed(decoder, first, [new_fd()])
        with pytest.raises(ProtocolError, match=message):
            next_frame(decoder)
        feed(decoder, Plan(1, 1, b"", b"").encode())
        with pytest.raises(ProtocolError):
            next_frame(decoder)
        decoder.close()


@pytest.mark.parametrize(("announced", "cut"), [(3, 0), (1, 0), (1, 1)], ids=["fewer", "more", "more, before the end"])
def test_mismatched_descriptors_are_refused(announced: int, cut: int) -> None:
    """A complete frame without its descriptors, and descriptors that no frame has announced."""
    with nothing_leaks():
        decoder = FrameDecoder()
        data = Plan(8, 1, b"body", b"", fds=announced).encode()
        feed(decoder, data[: len(data) - cut], [new_fd(), new_fd()])
        with pytest.raises(ProtocolError, match=f"2 file descriptors with a frame that announced {announced}"):
            next_frame(decoder)
        decoder.close()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise this process's limit of open files to some thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_descriptors_without_a_frame_are_bounded() -> None:
    """For a header that never ends."""
    with nothing_leaks():
        decoder = FrameDecoder()
        with pytest.raises(ProtocolError, match=f"file descriptors for a frame of at most {MAX_FDS}"):
            for byte in header():
                feed(decoder, bytes([byte]), [new_fd() for _ in range(FDS_PER_MESSAGE)])
                assert next_frame(decoder) is None
        assert len(decoder.fds) <= 2 * MAX_FDS + FDS_PER_MESSAGE
        decoder.close()


@pytest.mark.usefixtures("many_files")
def test_the_maximum_of_descriptors_is_accepted() -> None:
    """They arrive in several messages, and in order."""
    with nothing_leaks():
        decoder = FrameDecoder()
        data = Plan(9, 1, b"", b"", fds=MAX_FDS).encode()
        fds = [new_fd() for _ in range(MAX_FDS)]
        files = [file_of(fd) for fd in fds]
        for index, start in enumerate(range(0, MAX_FDS, FDS_PER_MESSAGE)):
            assert next_frame(decoder) is None
            feed(decoder, data[index : index + 1], fds[start : start + FDS_PER_MESSAGE])
        feed(decoder, data[len(range(0, MAX_FDS, FDS_PER_MESSAGE)) :])
        frame = next_frame(decoder)
        assert frame is not None and [file_of(fd) for fd in frame.fds] == files
        frame.close()


@given(st.lists(plans, min_size=1, max_size=3), st.data())
def test_damaged_streams_are_errors_or_other_frames(sent: list[Plan], data: st.DataObject) -> None:
    """A flipped byte within valid frames: memory stays within the received bytes."""
    stream = bytearray(b"".join(plan.encode() for plan in sent))
    stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    with nothing_leaks():
        decoder = FrameDecoder(Limits(body=1000, payload=1000))
        feed(decoder, bytes(stream), [new_fd() for _ in range(sum(plan.fds for plan in sent))])
        try:
            while (frame := next_frame(decoder)) is not None:
                frame.close()
        except ProtocolError:
            pass
        assert len(decoder.partial) <= len(stream)
        decoder.close()


def test_the_header_is_as_documented() -> None:
    """Every release reads the first five bytes, and refuses another version."""
    assert b"".join(encode_frame(3, 0x01020304, b"ab", b"cde", 1)) == (
        b"sRPC"
        + bytes([VERSION])
        + b"\x03\x00\x01"
        + b"\x01\x02\x03\x04"
        + b"\x00\x00\x00\x02"
        + b"\x00\x00\x00\x00\x00\x00\x00\x03"
        + b"abcde"
    )


@pytest.mark.parametrize(
    ("body", "payload", "fds", "message"),
    [
        (0, 0, MAX_FDS + 1, rf"{MAX_FDS + 1} file descriptors; the limit is {MAX_FDS}"),
        (Limits().body + 1, 0, 0, rf"a frame of {Limits().body + 1} \+ 0 bytes; the limits are {Limits().body} \+"),
        (0, Limits().payload + 1, 0, rf"a frame of 0 \+ {Limits().payload + 1} bytes; .*: large data travels as tensors"),
    ],
    ids=["fds", "body", "payload"],
)
def test_frames_beyond_the_limits_are_not_sent(body: int, payload: int, fds: int, message: str) -> None:
    """The sender gets an error instead of losing its connection."""
    with pytest.raises(ProtocolError, match=message):
        encode_frame(8, 1, bytes(body), bytes(payload), fds)


def test_a_zygotes_request_with_too_many_descriptors_is_refused() -> None:
    """The error has both numbers, because a script runs without a zygote then."""
    one, other = socket.socketpair()
    with one, other, pytest.raises(ConnectError, match="has 254 descriptors to pass on, and a zygote takes 253"):
        wire.send(one, wire.framed({"type": "x"}), [one.fileno()] * 254)
