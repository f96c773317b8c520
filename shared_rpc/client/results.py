"""Results: from a reply of the server to the value around its memory."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import msgspec

from shared_rpc.client.steps import Reply
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.errors import ProtocolError
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m


class ReceivedResult(msgspec.Struct):
    """A result of ``what`` that is not rebuilt yet. It owns its segments' descriptors, see :meth:`close`."""

    what: str
    message: m.Result
    skeleton: bytes
    segments: list[Segment]
    pooled: dict[int, ChunkReferences] = msgspec.field(default_factory=dict)
    transfer: ClientTransfer | None = None

    def close(self) -> None:
        """Close the descriptors, and release unused chunks of the server's pool."""
        for segment in self.segments:
            segment.descriptor = None
        for chunk, references in self.pooled.items():
            references.release([chunk])
        self.pooled = {}

    def __enter__(self) -> ReceivedResult:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def result_of(what: str, reply: Reply, transfer: ClientTransfer | None = None) -> ReceivedResult:
    """Take the result from a reply, with ownership of the descriptors.

    :raises ProtocolError: if there is none.
    """
    message, frame = reply.message, reply.frame
    if not isinstance(message, m.Result) or len(message.segments) != len(frame.fds) + len(frame.known):
        frame.close()
        raise ProtocolError(f"the server answered {what} with a {type(message).__name__} that is no valid result")
    segments = Segment.received(message.segments, frame)
    if transfer is None:
        return ReceivedResult(what, message, frame.payload, segments)
    if message.freed:
        transfer.arguments.release(message.freed)
    return ReceivedResult(what, message, frame.payload, segments, dict.fromkeys(message.chunks, transfer.references), transfer)


def rebuild(result: ReceivedResult, values: MutableMapping[str, Any]) -> Any:
    """Rebuild the value of a result, which is then closed.

    :param values: the values in this process, by object id.
    """
    from shared_rpc.codec.results import decode_result

    try:
        message = result.message
        label = f"object {message.object_id} of {result.what}" if message.object_id else f"the result of {result.what}"
        # In a list that is emptied: an error retained by the object's own code refers to this frame.
        origin = message.owner, result.pooled, label, message.object_id
        value = [decode_result(result.skeleton, message.table, result.segments, *origin)]
        for segment in result.segments:
            if segment.info.slab:
                MAPPINGS.keep_slab(segment.info)
        if result.transfer is not None and result.transfer.closed:
            MAPPINGS.release_slabs()  # the session has ended since the result arrived
        # Lists, tuples and dicts have no weak references: each result is a new one.
        if result.message.object_id and type(value[0]).__weakrefoffset__:
            value.append(values.setdefault(result.message.object_id, value[0]))
            del value[0]
        return value.pop()
    finally:
        result.close()
