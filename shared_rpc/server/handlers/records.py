"""Records that leave the server and enter it, and candidates."""

from __future__ import annotations

from shared_rpc.execution.outcomes import Failure
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.values import decode_call
from shared_rpc.server.handlers.table import Caller, entered, handles


@handles(x.ExportObject)
def export(caller: Caller, message: x.ExportObject) -> None:
    core = caller.core

    def exported() -> None:
        stored = core.stored(message.object_id)
        header = core.records.export(caller.session, stored)
        owners = tuple(segment.owner for segment in stored.record.segments)
        if not caller.reply(x.Exported(stored.object_id, stored.generation), header.to_bytes(), owners):
            core.release(caller.session, [stored.object_id])

    stored = core.stored(message.object_id)
    if stored.cold:
        core.tiers.when_warm(caller.wait(), stored, exported)
    else:
        exported()


@handles(x.CheckRecord)
def check_record(caller: Caller, message: x.CheckRecord) -> x.RecordFits:
    header, records = x.RecordHeader.from_bytes(caller.payload), caller.core.records
    devices = records.check(header)
    if message.called:
        caller.core.sessions.check_code(caller.session, "a record")
        records.check_call(header, message.endpoint, decode_call(message.args, message.kwargs))
    return x.RecordFits(devices)


@handles(x.Adopt)
def adopt(caller: Caller, message: x.Adopt) -> m.Message:
    caller.core.sessions.check_code(caller.session, "a record")
    generation = caller.core.records.adopt(
        caller.session,
        x.RecordHeader.from_bytes(caller.payload),
        message.buffers,
        message.endpoint,
        decode_call(message.args, message.kwargs),
        current=message.current,
    )
    return g.Refreshed(generation) if message.current else x.Candidate(generation)


@handles(x.PrepareCandidate)
def prepare(caller: Caller, message: x.PrepareCandidate) -> None:
    waiter, lowered, arguments = entered(caller, message)
    if message.sealed:
        deliver = waiter.deliver
        waiter.deliver = lambda outcome: deliver(outcome.seal() if isinstance(outcome, Failure) else outcome)

    def made(generation: g.Generation) -> bool:
        return caller.reply(x.Candidate(generation))

    caller.core.prepare(waiter, made, message.endpoint, lowered, arguments, frozenset(message.chain))


@handles(x.PromoteCandidate)
def promote(caller: Caller, message: x.PromoteCandidate) -> g.Refreshed:
    return g.Refreshed(caller.core.records.promote(message.object_id))
