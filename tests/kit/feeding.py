"""Frames from a stream that a test cuts into pieces, and descriptors that it can distinguish from all others of its process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shared_rpc.protocol.frames import Frame, FrameDecoder
from tests.kit.processes import links_of

_NAME = "counted"


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


def new_fd() -> int:
    """Open a file that has no other descriptor."""
    return os.memfd_create(_NAME, os.MFD_CLOEXEC)


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """Fail if a descriptor of :func:`new_fd` is left open; closing one twice fails by itself."""

    def count() -> int:  # by name: descriptors that other tests left behind may be closed at any moment
        return sum(link.startswith(f"/memfd:{_NAME} ") for link in links_of())

    before = count()
    yield
    assert count() == before
