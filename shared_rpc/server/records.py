"""Export of records, and adoption of those from other processes as objects, candidates or answers. Needs no torch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from shared_rpc.errors import BufferNotFound, CapabilityError, RecordError, RefreshError
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import exported as x
from shared_rpc.protocol import generations as g
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.exported import FORMAT, RecordHeader
from shared_rpc.protocol.records import Access, TensorTable
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.protocol.values import decode_call
from shared_rpc.server.generations import Generations
from shared_rpc.server.requests import Answer, Caller, Lowered, handles
from shared_rpc.server.runs import Runs
from shared_rpc.server.shared import State
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.state.records import (
    accesses,
    called,
    check_code,
    check_table,
    check_versions,
    homes,
    moved,
    without_slabs,
)
from shared_rpc.server.tiers import Tiers


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions that a skeleton depends on, by the fields of a :class:`RecordHeader`: Python's minor version, because
    of code pickled by value, torch's and ours. Nothing is imported: a broker needs no torch.
    """

    def public(name: str) -> str:
        try:
            # A local version, such as "+cpu", names the build.
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            return ""

    own: str = sys.modules["shared_rpc"].__version__
    return {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "torch": public("torch"), "shared_rpc": own}


class Records:
    """Requests about records. On the server's loop only."""

    def __init__(self, state: State, tiers: Tiers, generations: Generations, runs: Runs) -> None:
        self._state = state
        self._tiers = tiers
        self._generations = generations
        self._runs = runs

    @handles(x.ExportObject)
    def export(self, caller: Caller, message: x.ExportObject) -> Answer:
        """Describe an object's record, and grant the session a lease on it; at once if the object is on its device.

        :raises BufferNotFound: if it is a buffer that is no longer listed.
        :raises CapabilityError: if its value is not in shared memory.
        """

        def exported(stored: StoredObject) -> None:
            header, parts = self._header(caller.session, stored)
            owners = tuple(segment.owner for segment in stored.record.segments)
            if not caller.reply(x.Exported(stored.object_id, stored.generation, parts), header.to_bytes(), owners):
                self._state.release(caller.session, [stored.object_id])

        return self._tiers.serve(caller, lambda: self._state.stored(message.object_id), exported)

    def _header(self, session: str, stored: StoredObject) -> tuple[RecordHeader, dict[int, x.SlabPart]]:
        record = stored.record
        if not record.skeleton:
            raise CapabilityError(
                f"object {stored.object_id} of {stored.endpoint}() cannot be exported: in the local role (pid {os.getpid()}) "
                f"results lie in no shared memory. Serve the endpoints: SHARED_TENSOR_ROLE=server, or shared-rpc serve"
            )
        spec = self._state.registry.find(stored.endpoint)
        table, infos, parts = without_slabs(record.table, [segment.info for segment in record.segments])
        header = RecordHeader(
            format=FORMAT,
            endpoint=stored.endpoint,
            cache_key=stored.cache_key,
            generation=stored.generation,
            fingerprint=spec.fingerprint if spec is not None and not stored.stale else "",
            **installed_versions(),
            device=record.device,
            nbytes=record.nbytes,
            private_nbytes=record.private_nbytes,
            skeleton=record.skeleton,
            table=table,
            segments=infos,
        )
        if stored.kind == "buffer":
            self._state.buffers.get(session, stored.object_id)  # on its terms, with a lease
        else:
            self._state.leases.grant(session, stored.object_id)
        return header, parts

    def _check(self, header: RecordHeader) -> tuple[TensorTable, dict[str, str]]:
        """Check a record, independent of its call; return its table, and its devices here, see :func:`homes`.

        :raises RecordError: if it cannot be adopted here.
        """
        check_versions(header, installed_versions())
        table = check_table(header)
        return table, homes(header, table, self._state.device)

    def _check_call(self, header: RecordHeader, endpoint: str, call: Lowered) -> tuple[EndpointSpec, str]:
        """Return the endpoint and the key for a record.

        :param endpoint: its name, or ``""`` for the exported endpoint and key.
        :raises EndpointNotFound: if the server has none of that name.
        :raises RecordError, ConfigurationError: if the record cannot be its result.
        """
        spec = self._state.registry.get(endpoint or header.endpoint)
        return spec, called(header, spec, call if endpoint else None)

    @handles(x.CheckRecord)
    def check_record(self, caller: Caller, message: x.CheckRecord) -> m.Answer:
        """Answer with the devices of a record's segments if it could be adopted."""
        header = RecordHeader.from_bytes(caller.payload)
        _, places = self._check(header)
        if message.called:
            self._state.sessions.check_code(caller.session, "a record")
            self._check_call(header, message.endpoint, decode_call(message.args, message.kwargs))
        return m.Answer.of([places[info.device] for info in header.segments])

    @handles(x.Adopt)
    def adopt(self, caller: Caller, message: x.Adopt) -> m.Message:
        """Make an object of a record, whose bytes are in buffers of the session; these are unlisted.

        It is newer than every run that has begun, and older than later ones. If the cache does not list it, it is a
        candidate, on which the session has a lease.

        :raises RecordError, ConfigurationError: if it cannot be adopted; the buffers are unchanged then.
        :raises BufferNotFound: if a buffer is not the session's.
        """
        state, session, current = self._state, caller.session, message.current
        state.sessions.check_code(session, "a record")
        header = RecordHeader.from_bytes(caller.payload)
        call = decode_call(message.args, message.kwargs)
        table, places = self._check(header)
        spec, key = self._check_call(header, message.endpoint, call)
        allocated = self._allocated(session, header, message.buffers, places)
        record = self._record(header, table, places, allocated, spec)
        stored = state.objects.add(
            spec, key, record, run=state.runs.number(), listed=current, adopted=True, candidate=not current
        )
        if not current:
            state.leases.grant(session, stored.object_id)
        for one in allocated:
            state.buffers.free(one.object_id)
        if stored.listed:
            self._runs.became_current(stored)
        state.settle(stored.object_id)
        generation = self._generations.of(stored)
        return g.Refreshed(generation) if current else x.Candidate(generation)

    def answer(
        self, session: str, header: RecordHeader, buffers: Sequence[str], spec: EndpointSpec, take: Callable[[Record], None]
    ) -> None:
        """Make the record in allocated buffers the result of a run, see :meth:`adopt`.

        :param spec: the endpoint of the run.
        :param take: receives the record and owns it, even if it raises; in that case the buffers are unchanged.
        """
        table, places = self._check(header)
        check_code(header, spec)
        allocated = self._allocated(session, header, buffers, places)
        take(self._record(header, table, places, allocated, spec))
        for one in allocated:
            self._state.buffers.free(one.object_id)

    @staticmethod
    def _record(
        header: RecordHeader, table: TensorTable, places: dict[str, str], allocated: Sequence[StoredObject], spec: EndpointSpec
    ) -> Record:
        """Return the record in some buffers, with its own descriptors."""
        chosen = accesses(header, spec.access)
        skeleton, encoded = moved(header, table, places)
        segments = [one.record.segments[0] for one in allocated]
        for one, segment, access in zip(allocated, segments, chosen, strict=True):
            if segment.info.mechanism == "memfd":
                _seal(one, segment, access)
        return Record(
            skeleton,
            encoded,
            [segment.duplicate(access) for segment, access in zip(segments, chosen, strict=True)],
            header.nbytes,
            places[header.device],
            private_nbytes=header.private_nbytes,
        )

    def _allocated(
        self, session: str, header: RecordHeader, buffers: Sequence[str], places: dict[str, str]
    ) -> list[StoredObject]:
        """Return the buffers that hold the bytes of a record's segments."""
        if len(buffers) != len(header.segments) or len(set(buffers)) != len(buffers):
            raise RecordError(
                f"the record has {len(header.segments)} segments, and {len(set(buffers))} buffers were given for them: use the "
                f"buffers that allocate() has made for this record",
                reason="buffers",
            )
        allocated: list[StoredObject] = []
        for number, (object_id, info) in enumerate(zip(buffers, header.segments, strict=True)):
            device = places[info.device]
            stored = self._state.objects.get(object_id)
            if stored is None or stored.kind != "buffer" or session not in self._state.leases.holders(object_id):
                raise BufferNotFound(
                    f"this session does not hold buffer {object_id[:100]} for segment {number} of the record: another process "
                    f"has allocated it, it was freed, or the server has restarted without it. Allocate the record again, write "
                    f"it, and adopt that",
                    reason="unknown",
                )
            if stored.cold:
                raise RecordError(f"buffer {object_id} for segment {number} was evicted: resume its handle", reason="buffers")
            found = stored.record.segments[0].info if stored.record.segments else None
            if found is None or found.device != device or found.nbytes < info.nbytes or not stored.listed:
                raise RecordError(
                    f"buffer {object_id} is not for segment {number} of the record, which has {info.nbytes} bytes on {device}",
                    reason="buffers",
                )
            allocated.append(stored)
        return allocated

    @handles(x.PromoteCandidate)
    def promote(self, caller: Caller, message: x.PromoteCandidate) -> g.Refreshed:
        """Make a candidate the current generation of its key.

        :raises StaleHandleError: if there is no such object.
        :raises RefreshError: if it is not a candidate, its key was invalidated since, or a later one is current.
        """
        object_id, objects = message.object_id, self._state.objects
        stored = objects.get(object_id)
        if stored is None or not stored.candidate:
            what = f"generation {stored.generation} of {stored.cache_key}" if stored is not None else "nothing that is there"
            raise RefreshError(f"object {object_id[:100]} is no candidate: it is {what}")
        current = objects.current(stored.cache_key)
        if stored.invalidated:
            raise RefreshError(
                f"{stored.cache_key} was invalidated after its generation {stored.generation} was prepared: prepare another one"
            )
        if current is not None and current.run > stored.run:
            raise RefreshError(
                f"generation {current.generation} of {stored.cache_key} (object {current.object_id}) is later than candidate "
                f"{stored.generation}, and current"
            )
        objects.promote(stored)
        self._runs.became_current(stored)
        self._state.settle(stored.object_id)
        return g.Refreshed(self._generations.of(stored))


def _seal(buffer: StoredObject, segment: Segment, access: Access) -> None:
    """Seal host memory of allocated buffers for the record's access mode.

    :raises RecordError: if it was shared for writing and can no longer be sealed for reading.
    """
    try:
        HOST.seal(segment.fileno(), access)
    except PermissionError as error:
        if access != "read_write":
            raise RecordError(
                f"buffer {buffer.object_id} is shared for writing, and the record for reading: use the buffers that allocate() "
                f"has made for this record, before it is evicted",
                reason="buffers",
            ) from error
