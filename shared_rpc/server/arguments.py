"""The arguments of a call as they came, and the memory they refer to: in a server, on the client's word as little as can be,
and in a worker.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import msgspec

from shared_rpc.errors import ProtocolError, SegmentNotFound
from shared_rpc.memory.segments import Segment, SegmentInfo, new_segment_id
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import Arguments
from shared_rpc.server.session_lanes import Lanes, SessionLane
from shared_rpc.server.state.objects import ObjectStore

__all__ = ["read_arguments"]


def read_arguments(
    frame: Frame, message: m.Call, session: str, lanes: Lanes[SessionLane], objects: ObjectStore | None
) -> Arguments:
    """Return the arguments of a call. They own the frame's descriptors from here on.

    :param objects: those of the server, which knows their segments by id; None in a worker, whose broker sends a descriptor of
        every segment that is no arena, and whose ids are good.
    """
    if message.freed:
        lanes.of(session).give(message.freed)
    memory = message.segments or message.skeletons or message.kept or message.arenas or message.chunks or message.held
    if not (memory or frame.fds or frame.payload):
        return Arguments(message.args, message.kwargs, bytes(message.table), nbytes=len(frame.body))
    _check(frame, message)
    arguments = Arguments(message.args, message.kwargs, bytes(message.table), arenas=frozenset(message.arenas))
    arguments.chunks, arguments.held = message.chunks, message.held
    arguments.nbytes = len(frame.body) + len(frame.payload)
    arguments.session = session
    arguments.returnable = message.returnable and message.pooled
    arguments.loans = lanes.of(session).lent(message.chunks) if message.chunks else {}
    try:
        # First what came: the client will not send an arena again, whatever becomes of this call.
        _take_sent(arguments.segments, frame, message, lambda: lanes.of(session), trusted=objects is None)
        if message.held:
            # Chunks of its results that the session names: they stay as long as the endpoint has them.
            held = lanes.of(session).hold(message.held)
            if held is None:
                raise SegmentNotFound("the session has no such results", [info.id[:100] for info in message.segments])
            arguments.loans.update(held)
        _find_kept(arguments.segments, message, session, lanes, objects)
        start = 0
        for size in message.skeletons:
            arguments.skeletons.append(frame.payload[start : start + size])
            start += size
    except BaseException:
        arguments.close()
        raise
    return arguments


def _check(frame: Frame, message: m.Call) -> None:
    if (
        len(message.segments) != len(frame.fds) + len(set(message.kept))
        or not set(message.kept) | set(message.arenas) <= set(range(len(message.segments)))
        or sum(message.skeletons) != len(frame.payload)
        or min(message.skeletons, default=0) < 0
    ):
        raise ProtocolError("a call whose descriptors or skeletons do not match its message")


def _take_sent(
    segments: list[Segment], frame: Frame, message: m.Call, lane: Callable[[], SessionLane], *, trusted: bool
) -> None:
    """Append the segments whose descriptors came; those that are known by their ids have none yet."""
    kept, arenas = frozenset(message.kept), frozenset(message.arenas)
    sent = deque(frame.take_fds())
    try:
        for number, info in enumerate(message.segments):
            if number in kept:
                segments.append(Segment(info, -1))
            elif number in arenas:
                segments.append(lane().take_arena(info, sent.popleft()))
            else:
                segments.append(Segment(info if trusted else _renamed(info), sent.popleft()))
    finally:
        for fd in sent:
            os.close(fd)


def _renamed(info: SegmentInfo) -> SegmentInfo:
    """Return a segment with an id that is made here, so that no client can pass its memory off as another segment."""
    return msgspec.structs.replace(info, id=new_segment_id())


def _find_kept(
    segments: list[Segment], message: m.Call, session: str, lanes: Lanes[SessionLane], objects: ObjectStore | None
) -> None:
    if not message.kept:
        return

    def known(number: int) -> Segment | None:
        # A segment that the server keeps, of an object or of the session's results; it stays theirs.
        segment_id, lane = message.segments[number].id, lanes.find(session)
        found = objects.segment(segment_id) if objects is not None else None
        return found or (lane.result_segment(segment_id) if lane is not None else None)

    named = set(message.kept) - set(message.arenas)
    unknown = [message.segments[number].id[:100] for number in named if known(number) is None]
    if unknown:
        raise SegmentNotFound(f"this server does not keep, or not any more, the segments {', '.join(unknown)[:1000]}", unknown)
    for number in message.kept:
        found = known(number) if number in named else None
        if found is not None:
            # It is mapped as it is mapped here already: for writing.
            segments[number] = found.duplicate("read_write")
        elif segments[number].closed:
            segments[number] = lanes.of(session).arena(message.segments[number].id)
