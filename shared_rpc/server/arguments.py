"""The arguments of a call as they came, and the memory they refer to, taken on the client's word as little as can be."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from shared_rpc.errors import ProtocolError, SegmentNotFound
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import Arguments, Lender
from shared_rpc.protocol.values import decode_call
from shared_rpc.server.core import Core
from shared_rpc.server.session_lanes import SessionLane

if TYPE_CHECKING:
    from shared_rpc.server.connection import Connection

__all__ = ["ArgumentReader"]


class ArgumentReader:
    """Takes the arguments of one connection's calls."""

    def __init__(self, core: Core, connection: Connection) -> None:
        self._core = core
        self._connection = connection

    @property
    def _lane(self) -> SessionLane:
        return self._core.lanes.of(self._connection.session_id)

    def take(self, frame: Frame, message: m.Call) -> Arguments:
        """The arguments of a call. They own the frame's descriptors from here on."""
        if message.freed:
            self._lane.give(message.freed)
        if not (
            message.segments or message.skeletons or message.kept or message.arenas or message.chunks or message.held
        ) and not (frame.fds or frame.payload):
            return Arguments(*decode_call(message.args, message.kwargs), bytes(message.table), nbytes=len(frame.body))
        self._check(frame, message)
        arguments = Arguments([], {}, bytes(message.table), arenas=frozenset(message.arenas))
        arguments.chunks, arguments.held = message.chunks, message.held
        arguments.nbytes = len(frame.body) + len(frame.payload)
        arguments.session = self._connection.session_id
        arguments.returnable = message.returnable and message.pooled
        arguments.loans = self._lane.lent(message.chunks) if message.chunks else {}
        try:
            # First what came: the client will not send an arena again, whatever becomes of this call.
            self._take_sent(arguments.segments, frame, message)
            self._hold(arguments.loans, message)
            self._find_kept(arguments.segments, message)
            arguments.args, arguments.kwargs = decode_call(message.args, message.kwargs)
            start = 0
            for size in message.skeletons:
                arguments.skeletons.append(frame.payload[start : start + size])
                start += size
        except BaseException:
            arguments.close()
            raise
        return arguments

    @staticmethod
    def _check(frame: Frame, message: m.Call) -> None:
        if (
            len(message.segments) != len(frame.fds) + len(set(message.kept))
            or not set(message.kept) | set(message.arenas) <= set(range(len(message.segments)))
            or sum(message.skeletons) != len(frame.payload)
            or min(message.skeletons, default=0) < 0
        ):
            raise ProtocolError("a call whose descriptors or skeletons do not match its message")

    def _take_sent(self, segments: list[Segment], frame: Frame, message: m.Call) -> None:
        """The segments whose descriptors came; those that are known by their ids have none yet."""
        kept, arenas = frozenset(message.kept), frozenset(message.arenas)
        sent = deque(frame.take_fds())
        try:
            for number, info in enumerate(message.segments):
                if number in kept:
                    segments.append(Segment(info, -1))
                elif number in arenas:
                    segments.append(self._lane.take_arena(info, sent.popleft()))
                else:
                    # Its id is made here, so that no client can pass its memory off as another segment.
                    segments.append(Segment(msgspec.structs.replace(info, id=new_segment_id()), sent.popleft()))
        finally:
            for fd in sent:
                os.close(fd)

    def _hold(self, loans: dict[int, Lender], message: m.Call) -> None:
        """The chunks of its results that the session names: they stay as long as the endpoint has them."""
        if not message.held:
            return
        held = self._lane.hold(message.held)
        if held is None:
            raise SegmentNotFound("the session has no such results", [info.id[:100] for info in message.segments])
        loans.update(held)

    def _find_kept(self, segments: list[Segment], message: m.Call) -> None:
        named = set(message.kept) - set(message.arenas)
        unknown = [message.segments[number].id[:100] for number in named if self._kept(message.segments[number].id) is None]
        if unknown:
            raise SegmentNotFound(
                f"this server does not keep, or not any more, the segments {', '.join(unknown)[:1000]}", unknown
            )
        for number in message.kept:
            segment_id = message.segments[number].id
            if number in named:
                known = self._kept(segment_id)
                assert known is not None, "asked before"
                # It is mapped as it is mapped here already: for writing.
                segments[number] = known.duplicate("read_write")
            elif segments[number].closed:
                segments[number] = self._lane.arena(segment_id)

    def _kept(self, segment_id: str) -> Segment | None:
        """A segment that this server keeps: of an object, or of the session's results; it stays theirs."""
        lane = self._core.lanes.find(self._connection.session_id)
        return self._core.objects.segment(segment_id) or (lane.result_segment(segment_id) if lane is not None else None)
