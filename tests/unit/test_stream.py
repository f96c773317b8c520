"""A stream of frames on an event loop."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from shared_rpc.execution.stream import FramedStream
from shared_rpc.memory.segments import Descriptor
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.catalogue import decode_message, encode_message
from shared_rpc.protocol.frames import encode_frame
from tests.kit.processes import open_fds


@pytest.mark.asyncio
async def test_a_frame_without_its_descriptors_ends_the_reading(caplog: Any) -> None:
    """A frame whose descriptors were lost ends the reading, is logged, and is no error of who looks for the process's end."""
    taken: list[object] = []

    ours, theirs = socket.socketpair()
    stream = FramedStream(ours, lambda frame: taken.append(decode_message(frame)), lambda error: None)
    with theirs:
        for message, fds in ((w.Loaded(), 0), (w.Allocated(), 3)):
            kind, body = encode_message(message)
            theirs.sendall(b"".join(encode_frame(kind, 0, body, fds=fds)))
    stream.drain()
    stream.close()
    assert [type(message) for message in taken] == [w.Loaded]
    assert "cannot read the last frames of a process that has ended" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("at_once", [False, True])
async def test_messages_are_written_together_unless_at_once(at_once: bool) -> None:
    """What is sent while a frame is handled goes in one write with what else that brings, but for what cannot wait: it has
    left when the call returns, whatever becomes of this process then.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    arrived: list[bool] = []

    def handle(_: object) -> None:
        stream.send(w.RunStarted(), 1, at_once=at_once)
        try:
            arrived.append(bool(theirs.recv(1 << 16)))
        except BlockingIOError:
            arrived.append(False)

    stream = FramedStream(ours, handle, lambda error: None)
    with theirs:
        kind, body = encode_message(w.Loaded())
        theirs.sendall(b"".join(encode_frame(kind, 0, body)))
        stream.drain()
        stream.close()
    assert arrived == [at_once]


@pytest.mark.asyncio
async def test_an_answer_that_waits_takes_no_descriptor() -> None:
    """What is queued refers to the owner of its descriptor until it is written, however often it is queued."""
    ours, theirs = socket.socketpair()
    stream = FramedStream(ours, lambda frame: None, lambda error: None, fd_backpressure=10)
    owner = Descriptor(os.memfd_create("memory"))
    before = open_fds()
    with theirs:
        while not stream.congested:
            stream.send(w.Refused("x" * 1000, "", {}), 0, owners=(owner,))
        for _ in range(100):
            stream.send(w.Allocated(), 0, owners=(owner,))
        assert open_fds() == before
        assert stream.full
        assert stream.held_fds >= 100
        stream.close()
    del owner, stream
    assert open_fds() == before - 3
