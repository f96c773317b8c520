"""The arguments of a call as they came, and the memory they refer to, taken on the client's word as little as can be."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from shared_rpc.errors import ProtocolError, SegmentNotFound
from shared_rpc.memory.borrowing import Borrower
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.records import Arguments
from shared_rpc.server.core import Core
from shared_rpc.server.lanes import Lane
from shared_rpc.wire import messages as m
from shared_rpc.wire.frames import Frame
from shared_rpc.wire.values import decode_call

if TYPE_CHECKING:
    from shared_rpc.server.connection import Connection

__all__ = ["ArgumentReader"]


class ArgumentReader:
    """Takes the arguments of one connection's calls."""

    def __init__(self, core: Core, connection: Connection) -> None:
        self._core = core
        self._connection = connection

    @property
    def _session_id(self) -> str:
        assert self._connection.session is not None, "a request before the handshake"
        return self._connection.session.session_id

    @property
    def _lane(self) -> Lane:
        return self._core.lanes.of(self._session_id)

    def take(self, frame: Frame, message: m.Call) -> Arguments:
        """The arguments of a call. They own the frame's descriptors from here on."""
        if message.freed:
            self._lane.give(message.freed)
        loans = self._loans(message)
        arguments = Arguments([], {}, bytes(message.table), loans=loans)
        try:
            arguments.args, arguments.kwargs = decode_call(message.args, message.kwargs)
            self._take_segments(arguments.segments, frame, message)
            start = 0
            for size in message.skeletons:
                arguments.skeletons.append(frame.payload[start : start + size])
                start += size
        except BaseException:
            arguments.close()
            raise
        return arguments

    def _loans(self, message: m.Call) -> dict[int, Borrower]:
        """To whom the chunks of a call go back, of the client's pool, and of its own results that it names."""
        if not message.chunks and not message.held:
            return {}
        lane = self._lane
        held = set(message.held)
        if held and not lane.results.hold(held):
            lane.borrower.unused(message.chunks)
            raise SegmentNotFound("the session has no such results", [info.id[:100] for info in message.segments])
        return dict.fromkeys(message.chunks, lane.borrower) | dict.fromkeys(held, lane.own)

    def _take_segments(self, segments: list[Segment], frame: Frame, message: m.Call) -> None:
        """The segments of a call, those among them that are known by their ids, and those whose descriptors came."""
        kept, arenas = frozenset(message.kept), frozenset(message.arenas)
        if (
            len(message.segments) != len(frame.fds) + len(kept)
            or not kept | arenas <= set(range(len(message.segments)))
            or sum(message.skeletons) != len(frame.payload)
            or min(message.skeletons, default=0) < 0
        ):
            raise ProtocolError("a call whose descriptors or skeletons do not match its message")
        unknown = [
            info.id[:100]
            for number, info in enumerate(message.segments)
            if number in kept - arenas and self._kept(info.id) is None
        ]
        if unknown:
            raise SegmentNotFound(
                f"this server does not keep, or not any more, the segments {', '.join(unknown)[:1000]}", unknown
            )
        sent = deque(frame.take_fds())
        try:
            for number, info in enumerate(message.segments):
                if number in kept:
                    known = self._lane.arena(info.id) if number in arenas else self._kept(info.id)
                    assert known is not None, "asked before"
                    # It is mapped as it is mapped here already: for writing.
                    segments.append(known if number in arenas else known.duplicate("read_write"))
                elif number in arenas:
                    segments.append(self._lane.take_arena(info, sent.popleft()))
                else:
                    # Its id is made here, so that no client can pass its memory off as another segment.
                    segments.append(Segment(msgspec.structs.replace(info, id=new_segment_id()), sent.popleft()))
        finally:
            for fd in sent:
                os.close(fd)

    def _kept(self, segment_id: str) -> Segment | None:
        """A segment that this server keeps: of an object, or of the session's results; it stays theirs."""
        lane = self._core.lanes.find(self._session_id)
        return self._core.objects.segment(segment_id) or (lane.results.segment(segment_id) if lane is not None else None)
