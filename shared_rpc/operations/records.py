"""Export and adoption of records, and candidates: generations that exist but are not current."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from shared_rpc.client.exported import ExportedRecord, SegmentBytes
from shared_rpc.client.handle import Lease, drop_handles
from shared_rpc.client.sending import lower
from shared_rpc.client.steps import Lend, Operation, Reply, Request, Work, ask, message_of, query
from shared_rpc.client.suspension import Context, release_leases
from shared_rpc.errors import ProtocolError
from shared_rpc.memory.mapping import MAPPINGS, MappingHold
from shared_rpc.memory.segments import Segment
from shared_rpc.operations.binding import Leased, Steps, id_of, make_handle, operation
from shared_rpc.operations.handles import lending
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.exported import RecordHeader
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.records import NO_ARGS, NO_KWARGS

T = TypeVar("T")


class RecordOperations:
    """Records and candidates."""

    @operation
    def export(ctx: Context, handle: Lease[Any] | str) -> Steps[ExportedRecord]:
        """Return the record of an object: its header, and its memory as readable buffers, without a copy.

        The record holds the object until it is closed. Writes to the object during that time, by :meth:`update`, are visible
        in the record, even half-written.

        :param handle: a handle, or an object's id.
        :raises StaleHandleError: if the server does not own the object.
        :raises CapabilityError: in the local role, where results are not in shared memory, or if this process cannot map it.
        """
        what = f"export({id_of(handle)!r})"
        server = yield from ctx._reached()
        reply: Reply = yield Request(x.ExportObject(id_of(handle)), what)
        message, frame = reply.message, reply.frame
        if not isinstance(message, x.Exported):
            raise ProtocolError(f"the server answered {what} with {type(message).__name__}, not with Exported")
        header = RecordHeader.from_bytes(frame.payload)
        if len(frame.fds) != len(header.segments):
            raise ProtocolError(f"the server answered {what} with {len(frame.fds)} descriptors")
        lease = yield from make_handle(ctx, message, None)
        parts = [message.parts.get(number, x.SlabPart(info, 0)) for number, info in enumerate(header.segments)]
        # Copy-on-write segments are only read here.
        infos = [replace(part.slab, access="read") if part.slab.access == "copy" else part.slab for part in parts]
        segments = Segment.received(infos, frame)
        holds = yield Work(functools.partial(_held, segments, server.server_id))
        placed = zip(header.segments, holds, parts, strict=True)
        read = [SegmentBytes(info, hold, writable=False, offset=part.offset) for info, hold, part in placed]
        return ExportedRecord(header, read, [lease], allocated=False)

    @operation
    def allocate(ctx: Context, header: RecordHeader, ttl: float | None = None) -> Steps[ExportedRecord]:
        """Allocate memory for a record: a buffer of this server for each of its segments, to be written before :meth:`adopt`.

        The server first checks that the record could be adopted, as far as that does not depend on a call. The buffers count
        and end like those of :meth:`create_buffer`: with this process, in any way.

        :param header: that of an exported record, of this server or of another one.
        :param ttl: seconds for which the buffers are kept even without this process.
        :raises RecordError: if the record cannot be adopted here: it was made with other versions, or for another device.
        :raises ServerBusy: if the device, or its quota, has too little free memory now.
        :raises CapabilityError: if the device's total memory is too small.
        """
        return (yield from _allocated(ctx, header, ttl, x.CheckRecord()))

    @operation
    def adopt(
        ctx: Context, record: ExportedRecord, endpoint: str | None = None, /, *args: Any, **kwargs: Any
    ) -> Steps[Generation]:
        """Make a record the cached result of a call, as if the server had built it; return its description.

        If a result is cached under the call's key, the record becomes its next generation, reported like a refresh; runs of
        the call that started earlier do not replace it. An allocated record is taken over without a copy, and closed. A
        record that was exported, by this server or another one, is copied into an allocated one first, and stays open.

        Nothing is unpickled, here or in the server, but callers of the endpoint do unpickle: adopt records only from trusted
        sources.

        :param record: one that this client has allocated and written, or an exported one.
        :param endpoint: the endpoint whose call with ``args`` and ``kwargs`` has this result; None for the exported endpoint
            and key.
        :raises RecordError: if it cannot be adopted here; ``reason`` says why. Then nothing has changed.
        :raises BufferNotFound: if another process has allocated the record, or its memory in the server was freed.
        :raises EndpointNotFound: if the server has no endpoint of that name.
        :raises ConfigurationError: if the call is not cached.
        :raises ServerBusy: like :meth:`allocate`.
        """
        message = yield from _adopted(ctx, record, endpoint, args, kwargs, g.Refreshed)
        return cast(g.Refreshed, message).generation

    @lending
    def adopt_candidate(
        ctx: Context, record: ExportedRecord, endpoint: str | None = None, /, *args: Any, **kwargs: Any
    ) -> Steps[Leased[Generation]]:
        """Make a record a candidate: an object that is not current until :meth:`promote`; return its handle.

        Only the handle keeps it. For the parameters and errors see :meth:`adopt`.
        """
        message = yield from _adopted(ctx, record, endpoint, args, kwargs, x.Candidate)
        candidate = cast(x.Candidate, message).generation
        return cast(Leased[Generation], (yield Lend(candidate, candidate)))

    @lending
    def prepare(ctx: Context, endpoint: str, /, *args: Any, **kwargs: Any) -> Steps[Leased[Generation]]:
        """Build the next generation of a cached call's object as a candidate, which is not current until :meth:`promote`.

        Only the returned handle keeps it; its value is the candidate's description, not the object, which :meth:`open_ticket`
        attaches. An exception of the endpoint is raised here.

        :raises ConfigurationError: if the call is not cached.
        :raises RefreshError: if the call was invalidated during the build.
        :raises DeadlineExceeded: after the client's timeout.
        """
        what = f"prepare({endpoint!r})"
        reply, _ = yield from ctx._sent(x.PrepareCandidate, endpoint, args, kwargs, what)
        candidate = message_of(reply, what, x.Candidate).generation
        return cast(Leased[Generation], (yield Lend(candidate, candidate)))

    @operation
    def promote(ctx: Context, candidate: Lease[Any] | str) -> Steps[Generation]:
        """Make a candidate the current generation of its call, and report it like a refresh; return its description.

        :param candidate: the handle of :meth:`prepare` or :meth:`adopt_candidate`, which is unchanged, or an object's id.
        :raises RefreshError: if it is not (any more) a candidate, if its call was invalidated since it was prepared, or if a
            later generation is current.
        """
        name = id_of(candidate)
        return (yield from ask(Request(x.PromoteCandidate(name), f"promote({name!r})"), g.Refreshed)).generation


def _held(segments: Sequence[Segment], owner: str) -> list[MappingHold]:
    """Map segments of a server, and close them.

    :param owner: the id of the server that keeps them.
    """
    try:
        with MAPPINGS.attach(segments, keep=True, owner=owner) as mappings:
            return [MAPPINGS.hold(mapping) for mapping in mappings]
    finally:
        for segment in segments:
            segment.close()


def _allocated(ctx: Context, header: RecordHeader, ttl: float | None, question: x.CheckRecord) -> Operation[ExportedRecord]:
    server = yield from ctx._reached()
    what = "allocate"
    devices = yield from query(question, what, header.to_bytes())
    leases: list[Lease[Any]] = []
    parts: list[SegmentBytes] = []
    for info, device in zip(header.segments, devices, strict=True):
        reply: Reply = yield Request(m.CreateBuffer(info.nbytes, device=device, ttl=ttl, for_record=True), what)
        made = reply.message
        if not isinstance(made, m.Result) or len(made.segments) != 1:
            raise ProtocolError(f"the server answered {what} with {type(made).__name__}, not with the Result for a buffer")
        leases.append((yield Lend(made, None)))
        segments = Segment.received(made.segments, reply.frame)
        [hold] = yield Work(functools.partial(_held, segments, server.server_id))
        used = replace(segments[0].info, nbytes=info.nbytes, access=info.access)
        parts.append(SegmentBytes(used, hold, writable=True))
    return ExportedRecord(header, parts, leases, allocated=True)


def _adopted(
    ctx: Context, record: ExportedRecord, endpoint: str | None, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Any]
) -> Operation[m.Message]:
    what = f"adopt({endpoint!r})" if endpoint is not None else "adopt()"
    server = yield from ctx._reached()
    encoded, named = (NO_ARGS, NO_KWARGS), endpoint or ""
    if endpoint is not None:
        arguments = yield from lower(args, kwargs, server.device)
        encoded = arguments.args, arguments.kwargs

    def send(buffers: list[str]) -> Operation[m.Message]:
        message = x.Adopt(buffers, named, *encoded, current=kind is g.Refreshed)
        answer: m.Message = yield from ask(Request(message, what, record.header.to_bytes()), kind)
        return answer

    return (yield from send_record(ctx, record, x.CheckRecord(True, named, *encoded), send))


def send_record(
    ctx: Context, record: ExportedRecord, question: x.CheckRecord, send: Callable[[list[str]], Operation[T]]
) -> Operation[T]:
    """Pass an allocated record, or an allocated copy of another one, to the server, and close it when the server has it.

    :param question: sent before a copy is allocated.
    :param send: sends the ids of its buffers, and returns the answer.
    """
    server = yield from ctx._reached()
    record._check_open()
    allocated = record
    try:
        if not record.allocated or any(lease.server_id != server.server_id for lease in record._leases):
            allocated = yield from _allocated(ctx, record.header, None, question)
            yield Work(functools.partial(_copy, record, allocated))
        elif allocated.segments:
            yield Work(functools.partial(_synchronize, allocated))
        answer = yield from send([lease.object_id for lease in allocated._leases])
    except BaseException:
        if allocated is not record:
            allocated._unmap()
        raise
    yield from release_leases(ctx, *drop_handles(allocated._unmap()))
    return answer


def _copy(record: ExportedRecord, allocated: ExportedRecord) -> None:
    record.copy_to(allocated)
    _synchronize(allocated)


def _synchronize(record: ExportedRecord) -> None:
    """Wait until this process's writes are complete: another process reads them without a common stream."""
    for segment in {segment.info.device: segment for segment in record.segments}.values():
        segment.synchronize()
