"""A stream of frames on an event loop."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from shared_rpc.protocol import worker as w
from shared_rpc.protocol.catalogue import decode_message, encode_message
from shared_rpc.protocol.frames import encode_frame
from shared_rpc.server.stream import FramedStream


@pytest.mark.asyncio
async def test_what_a_dead_process_sent_cannot_be_read(caplog: Any) -> None:
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
    assert "what a process had sent before its end cannot be read" in caplog.text
