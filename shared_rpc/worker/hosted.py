"""One provider in a worker, and the memory of its sessions."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

from shared_rpc.errors import SegmentNotFound
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import worker as w
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import Arguments
from shared_rpc.protocol.values import decode_call
from shared_rpc.server.in_process import InProcessExecutor
from shared_rpc.server.lanes import Lane, lanes_of

if TYPE_CHECKING:
    from shared_rpc.provider import Provider

__all__ = ["Hosted", "arguments_of", "given_back"]


class Hosted:
    """One provider: its executor, and the memory of the broker's sessions."""

    def __init__(self, key: str, provider: Provider, max_workers: int | None) -> None:
        self.key = key
        self.provider = provider
        self.lanes = lanes_of(provider.pool)
        self.executor = InProcessExecutor(provider.endpoints, provider.device_id, self.lanes, max_workers)

    def find(self, session: str) -> Lane | None:
        """The lane of a session that has one."""
        return self.lanes.find(session)


def given_back(hosted: Hosted | None, session: str) -> list[int]:
    """Chunks of the client's that can go back to it."""
    lane = hosted.find(session) if hosted is not None else None
    return lane.returned() if lane is not None else []


def arguments_of(hosted: Hosted, message: w.Run, frame: Frame) -> Arguments:
    """The arguments of a run. They own the frame's descriptors from here on."""
    arguments = Arguments([], {}, bytes(message.table), arenas=frozenset(message.arenas), returnable=message.returnable)
    kept = frozenset(message.kept)
    sent = deque(frame.take_fds())
    try:
        for number, info in enumerate(message.segments):
            if number in kept:
                arguments.segments.append(hosted.lanes.of(message.session).arena(info.id))
            elif number in arguments.arenas and message.chunks:
                arguments.segments.append(hosted.lanes.of(message.session).take_arena(info, sent.popleft()))
            else:
                arguments.segments.append(Segment(info, sent.popleft()))
        if message.chunks:
            arguments.loans.update(hosted.lanes.of(message.session).lent(message.chunks))
        if message.held:
            held = hosted.lanes.of(message.session).hold(message.held)
            if held is None:
                raise SegmentNotFound("the session has no such results", [info.id for info in message.segments])
            arguments.loans.update(held)
        arguments.args, arguments.kwargs = decode_call(message.args, message.kwargs)
        start = 0
        for size in message.skeletons:
            arguments.skeletons.append(frame.payload[start : start + size])
            start += size
    except BaseException:
        arguments.close()
        for fd in sent:
            os.close(fd)
        raise
    return arguments
