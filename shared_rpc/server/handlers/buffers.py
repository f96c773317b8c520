"""Buffers that clients make, and the devices on which they can be."""

from __future__ import annotations

from shared_rpc.errors import SegmentNotFound
from shared_rpc.execution.outcomes import Failure
from shared_rpc.protocol import messages as m
from shared_rpc.server.handlers.table import Caller, handles
from shared_rpc.server.runs import Delivery


@handles(m.CreateBuffer)
def create_buffer(caller: Caller, message: m.CreateBuffer) -> None:
    waiter, buffers = caller.wait(), caller.core.buffers

    def deliver(outcome: Delivery | Failure) -> None:
        if not caller.deliver(outcome) and isinstance(outcome, Delivery) and outcome.stored is not None:
            buffers.table.free(outcome.stored.object_id)  # no client will ever know its id

    waiter.deliver = deliver
    buffers.create(waiter, message)


@handles(m.KeepSegments)
def keep_segments(caller: Caller, message: m.KeepSegments) -> None:
    found = {segment_id: caller.core.objects.segment(segment_id) for segment_id in message.segment_ids}
    unknown = [segment_id[:100] for segment_id, segment in found.items() if segment is None]
    if unknown:
        raise SegmentNotFound(f"this server does not have the segments {', '.join(unknown)[:1000]} any more", unknown)
    segments = [segment for segment in found.values() if segment is not None]
    caller.core.buffers.keep(caller.wait(), segments, message.linger)


@handles(m.GetBuffer)
def get_buffer(caller: Caller, message: m.GetBuffer) -> None:
    caller.core.buffers.get(caller.wait(), message.object_id)


@handles(m.FreeBuffer)
def free_buffer(caller: Caller, message: m.FreeBuffer) -> m.Count:
    freed = caller.core.buffers.table.free(message.object_id)
    if message.release:
        caller.core.release(caller.session, [message.object_id])
    return m.Count(int(freed))


@handles(m.ListDevices)
def list_devices(caller: Caller, message: m.ListDevices) -> None:
    caller.core.buffers.list_devices(caller.wait(), lambda infos: caller.reply(m.DevicesReply(infos)))
