"""The received arguments of a call, and the memory that they refer to: in workers, and in servers, which trust the client's
message as little as possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from shared_rpc.errors import ProtocolError, SegmentNotFound
from shared_rpc.execution.transfer import SessionTransfer, Transfers
from shared_rpc.memory.closing import CLOSER
from shared_rpc.memory.records import Arguments
from shared_rpc.memory.segments import Segment, new_segment_id
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.records import sent_infos

SegmentOf = Callable[[str], Segment | None]


def read_arguments(
    frame: Frame, message: m.Call, session: str, transfers: Transfers[SessionTransfer], segment_of: SegmentOf | None
) -> Arguments:
    """Return the arguments of a call. They take ownership of the frame's descriptors.

    :param segment_of: finds a segment of the server's objects by its id; None in a worker, whose broker has checked the ids and
        sends a descriptor of every segment except arenas.
    """
    transfer = transfers.find(session)
    infos = sent_infos(message.segments)
    if transfer is None and (message.freed or message.chunks or any(info.arena for info in infos)):
        transfer = transfers.of(session)
    if transfer is not None and message.freed:
        transfer.release_results(message.freed)
    memory = message.segments or message.skeletons or message.chunks
    if not (memory or frame.fds or frame.payload):
        return Arguments(message.args, message.kwargs, bytes(message.table), nbytes=len(frame.body))
    if len(infos) != len(frame.fds) or sum(message.skeletons) != len(frame.payload) or min(message.skeletons, default=0) < 0:
        raise ProtocolError("the descriptors or skeletons of a call do not match its message")
    arguments = Arguments(message.args, message.kwargs, bytes(message.table), chunks=message.chunks)
    arguments.nbytes = len(frame.body) + len(frame.payload)
    arguments.session = session
    unknown: list[str] = []
    sent = deque(frame.detach_fds())
    trusted = segment_of is None
    try:
        if transfer is not None and message.chunks:
            arguments.pooled = transfer.lent(message.chunks)
        for ref in message.segments:
            if isinstance(ref, str):
                found = transfer.arena(ref) if transfer is not None else None
                if found is None and segment_of is not None and (own := segment_of(ref)) is not None:
                    # Mapped for writing, like the existing mapping; restored memory is mapped as it is shared, since it may be
                    # sealed.
                    found = own.duplicate("read_write" if own.info.id == own.info.name else None)
                if found is None:
                    unknown.append(ref[:100])
                    continue
            elif ref.arena:
                assert transfer is not None, "it was created for the arena"
                found = transfer.add_arena(ref, sent.popleft())
            else:
                # With a new id, no client can pass its memory off as another segment.
                info = ref if trusted else msgspec.structs.replace(ref, id=new_segment_id())
                found = Segment.owning(info, sent.popleft(), foreign=not trusted)
            arguments.segments.append(found)
        if unknown:  # not before: the client sends an arena only once, even if this call fails
            raise SegmentNotFound(f"this server does not have the segments {', '.join(unknown)[:1000]} any more", unknown)
        start = 0
        for size in message.skeletons:
            arguments.skeletons.append(frame.payload[start : start + size])
            start += size
    except BaseException:
        arguments.close()
        raise
    finally:
        CLOSER.discard(list(sent))
    return arguments
