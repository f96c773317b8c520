"""The source of records: its misses, and its answers."""

from __future__ import annotations

import msgspec

from shared_rpc.errors import ProtocolError, from_wire
from shared_rpc.execution.outcomes import Failure
from shared_rpc.protocol import messages as m
from shared_rpc.protocol import sources as s
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.records import EMPTY_TABLE
from shared_rpc.server.handlers.table import Caller, handles
from shared_rpc.server.runs import Delivery, Waiter

#: The table of a result without a value.
_NO_TABLE = msgspec.Raw(EMPTY_TABLE)
#: Bytes of a source's status, which everybody gets who asks for the server's info.
_STATUS = 64 << 10


@handles(s.AttachSource)
def attach_source(caller: Caller, message: s.AttachSource) -> s.SourceAttached:
    core = caller.core
    if core.sessions.peer_of(caller.session) is not None:  # the server's own process needs no proof
        core.sources.check_token(message.token)
    return s.SourceAttached(core.sources.attach(caller.session).number, core.server_id)


@handles(s.AwaitMisses)
def await_misses(caller: Caller, message: s.AwaitMisses) -> None:
    caller.core.sources.wait(caller.wait(), message.source, message.after, lambda misses: caller.reply(s.Misses(misses)))


@handles(s.BuildMiss)
def build_miss(caller: Caller, message: s.BuildMiss) -> None:
    caller.core.sources.build(_leased(caller), message.source, message.miss)


@handles(s.AdoptMiss)
def adopt_miss(caller: Caller, message: s.AdoptMiss) -> None:
    core, header, session = caller.core, RecordHeader.from_bytes(caller.payload), caller.session
    spec = core.sources.spec_of(session, message.source, message.miss)
    waiter = _leased(caller)
    core.records.answer(
        session,
        header,
        message.buffers,
        spec,
        lambda record: core.sources.adopt(waiter, message.source, message.miss, record),
    )


@handles(s.FailMiss)
def fail_miss(caller: Caller, message: s.FailMiss) -> m.Count:
    error = from_wire(message.code, message.text, message.detail)
    failure = Failure(message.code, message.text, message.detail, message.pickled, error)
    caller.core.sources.fail(caller.session, message.source, message.miss, failure)
    return m.Count(1)


@handles(s.ReportStatus)
def report_status(caller: Caller, message: s.ReportStatus) -> m.Count:
    nbytes = len(msgspec.msgpack.encode(message.status))
    if nbytes > _STATUS:
        raise ProtocolError(f"the status of a source of records has {nbytes} bytes: report at most {_STATUS}")
    caller.core.sources.report(caller.session, message.source, message.status)
    return m.Count(1)


@handles(s.DetachSource)
def detach_source(caller: Caller, message: s.DetachSource) -> m.Count:
    return m.Count(int(caller.core.sources.detach(caller.session, message.source)))


def _leased(caller: Caller) -> Waiter:
    """Register the request: its answer is a lease on the object alone, which the asker has no use for the value of."""
    waiter = caller.wait()

    def deliver(outcome: Delivery | Failure) -> None:
        if isinstance(outcome, Failure):
            caller.fail(outcome.seal())
            return
        stored = outcome.stored
        assert stored is not None and outcome.managed, "the object of a miss is managed"
        answer = m.Result(
            _NO_TABLE,
            [],
            object_id=stored.object_id,
            generation=stored.generation,
            managed=True,
            owner=caller.core.server_id,
        )
        if not caller.reply(answer):
            caller.core.release(caller.session, [stored.object_id])

    waiter.deliver = deliver
    return waiter
