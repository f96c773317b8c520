"""Frames from a stream that a test cuts into pieces."""

from __future__ import annotations

from collections.abc import Iterable

from shared_rpc.protocol.frames import Frame, FrameDecoder


def feed(decoder: FrameDecoder, data: bytes | memoryview, fds: Iterable[int] = ()) -> None:
    """Add received bytes and their descriptors, which the decoder owns from now on."""
    decoder.fds += fds
    decoder.partial += data
    decoder.check_fds()


def next_frame(decoder: FrameDecoder) -> Frame | None:
    """Return the next complete frame, None if more bytes are needed.

    :raises ProtocolError: see :meth:`FrameDecoder.ready`.
    """
    return decoder.frames.popleft() if decoder.ready() else None
