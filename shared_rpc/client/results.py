"""Taking a result: what the server answered, and the value around its memory."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shared_rpc.client.lane import Lane
from shared_rpc.client.steps import Operation, Reply, Request, Tell, Work, ask
from shared_rpc.errors import ConnectionClosed, ProtocolError
from shared_rpc.errors.interrupts import is_interrupt
from shared_rpc.memory.borrowing import Borrower
from shared_rpc.memory.pool import Chunk
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m

__all__ = ["Result", "result_of", "valued"]


@dataclass(slots=True)
class Result:
    """A result that is not rebuilt yet. It owns its segments' descriptors, see :meth:`close`. ``what`` it is the result of."""

    what: str
    message: m.Result
    skeleton: bytes
    segments: list[Segment]
    loans: dict[int, Borrower] = field(default_factory=dict)
    #: Of the client's own pool, in place of segments.
    chunk: Chunk | None = None

    def close(self) -> None:
        """Close the descriptors, and give back the chunks of the server's pool that nothing has used."""
        for segment in self.segments:
            segment.close()
        for chunk, borrower in self.loans.items():
            borrower.unused([chunk])
        self.loans = {}

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def result_of(what: str, reply: Reply, lane: Lane | None = None, held: Sequence[int] = ()) -> Result:
    """The result in a reply, whose descriptors it owns.

    :param held: chunks of the client's pool that went with the call and were held for it: it has that hold of the one that it
        lies in, and the others are given back.
    :raises ProtocolError: if there is none.
    :raises ConnectionClosed: if its memory went with the session, because another request has met the next server meanwhile.
    """
    message, frame = reply.message, reply.frame
    kept = len(message.kept) if isinstance(message, m.Result) else 0
    if (
        not isinstance(message, m.Result)
        or len(message.segments) != len(frame.fds) + kept
        or (lane is None and (kept or message.own))
    ):
        frame.close()
        raise ProtocolError(f"the server answered {what} with {type(message).__name__}, which does not fit")
    if lane is None:
        segments = [Segment(info, -1) for info in message.segments]
        for segment in segments:
            segment.adopt(frame.fds)
        return Result(what, message, frame.payload, segments)
    if message.freed:
        lane.arguments.give(message.freed)
    if message.own:
        frame.close()
        chunk = lane.own_chunk(message, held)
        return Result(what, message, frame.payload, [], {chunk.number: lane.own}, chunk)
    segments = lane.segments(message.segments, message.kept, message.arenas, frame.fds)
    if lane.closed and any(segment.closed for segment in segments):
        for segment in segments:
            segment.close()
        raise ConnectionClosed(f"the server went away before the result of {what} was taken")
    return Result(what, message, frame.payload, segments, dict.fromkeys(message.chunks, lane.borrower))


def valued(result: Result, values: MutableMapping[str, Any]) -> Operation[tuple[m.Result, Any]]:
    """Rebuild a result: ``(message, value)``. Where that fails, the lease that came with it is given back.

    :param values: the values that live in this process, by object id.
    """
    object_id = result.message.object_id
    known = values.get(object_id)
    if known is not None:
        result.close()
        return result.message, known
    try:
        nbytes = len(result.skeleton) + len(result.message.table)
        value = yield Work(lambda: _rebuild(result, values), nbytes)
    except GeneratorExit:
        result.close()
        raise
    except BaseException as error:
        result.close()
        if result.message.managed and not is_interrupt(error):
            yield from ask(Request(m.Release([object_id]), "release"), m.Count)
        elif result.message.managed:  # cancelled or interrupted, and not to wait for anything
            yield Tell(m.Release([object_id]))
        raise
    return result.message, value


def _rebuild(result: Result, values: MutableMapping[str, Any]) -> Any:
    from shared_rpc.codec import decode_result, take_back

    with result:
        loans, result.loans = result.loans, {}
        message = result.message
        if result.chunk is not None:
            return take_back(result.skeleton, message.table, result.chunk, loans[result.chunk.number])
        label = f"object {message.object_id} of {result.what}" if message.object_id else f"the result of {result.what}"
        # In a list that is emptied: an error that the object's own code caught, and somebody keeps, keeps this frame.
        value = [decode_result(result.skeleton, message.table, result.segments, message.owner, loans, message.arenas, label)]
        if result.message.object_id:
            with suppress(TypeError):  # lists, tuples and dicts have no weak references, and are made anew
                value.append(values.setdefault(result.message.object_id, value[0]))
                del value[0]
        return value.pop()
