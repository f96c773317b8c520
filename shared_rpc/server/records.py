"""Records that leave a server, and those that enter it: exported, adopted, prepared and promoted. Needs no torch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from shared_rpc.errors import BufferNotFound, CapabilityError, RecordError, RefreshError
from shared_rpc.execution.endpoints import Registry
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.exported import FORMAT, RecordHeader
from shared_rpc.protocol.generations import Generation
from shared_rpc.protocol.records import Access
from shared_rpc.protocol.specs import EndpointSpec
from shared_rpc.server.generations import Generations
from shared_rpc.server.state.buffers import BufferTable
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.state.records import (
    Versions,
    access_of,
    accesses,
    called,
    check_code,
    check_table,
    check_versions,
    homes,
    moved,
    tensors_of,
)

__all__ = ["Records", "installed_versions"]

#: The arguments of a call as plain data: by position, by name.
_Lowered = tuple[Sequence[Any], dict[str, Any]]


@functools.cache
def installed_versions() -> Versions:
    """Return the versions of this environment. Nothing is imported: a broker needs no torch."""

    def public(name: str) -> str:
        try:
            # What a local version says, as "+cpu", is how it was built.
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            return ""

    own: str = sys.modules["shared_rpc"].__version__
    return Versions(f"{sys.version_info.major}.{sys.version_info.minor}", public("torch"), own)


class Records:
    """Requests about records. On the server's loop only.

    :param device: the id of the server's device.
    :param number: returns the next number in the order of runs.
    :param settle: called with the ids of objects that were added.
    """

    def __init__(
        self,
        device: str,
        registry: Registry,
        objects: ObjectStore,
        leases: LeaseTable,
        buffers: BufferTable,
        generations: Generations,
        number: Callable[[], int],
        settle: Callable[[str], None],
    ) -> None:
        self._device = device
        self._registry = registry
        self._objects = objects
        self._leases = leases
        self._buffers = buffers
        self._generations = generations
        self._number = number
        self._settle = settle

    def export(self, session: str, stored: StoredObject) -> RecordHeader:
        """Describe an object's record, and grant the session a lease on it.

        :raises BufferNotFound: if it is a buffer that cannot be got any more.
        :raises CapabilityError: if its value lies in no shared memory.
        """
        record = stored.record
        if not record.skeleton:
            raise CapabilityError(
                f"object {stored.object_id} of {stored.endpoint}() cannot be exported: in the local role (pid {os.getpid()}) "
                f"results lie in no shared memory. Serve the endpoints: SHARED_TENSOR_ROLE=server, or shared-rpc serve"
            )
        spec = self._registry.find(stored.endpoint)
        infos = tuple(segment.info for segment in record.segments)
        here = installed_versions()
        header = RecordHeader(
            format=FORMAT,
            endpoint=stored.endpoint,
            cache_key=stored.cache_key,
            generation=stored.generation,
            fingerprint=spec.fingerprint if spec is not None and not stored.stale else "",
            python=here.python,
            torch=here.torch,
            shared_rpc=here.shared_rpc,
            device=record.device,
            access=access_of(infos),
            tensors="parameters" if tensors_of(infos) == "parameters" else "all",
            nbytes=record.nbytes,
            private_nbytes=record.private_nbytes,
            skeleton=record.skeleton,
            table=bytes(record.table),
            segments=infos,
        )
        if stored.kind == "buffer":
            self._buffers.get(session, stored.object_id)  # on its terms, with a lease
        else:
            if stored.listed and stored.cache_key is not None:
                self._objects.lookup(stored.cache_key)  # this counts as an access
            self._leases.grant(session, stored.object_id)
        return header

    def check(self, header: RecordHeader) -> list[str]:
        """Check a record, whatever its call; return for each of its segments the device that its bytes are to be on.

        :raises RecordError: if it cannot be adopted here.
        """
        check_versions(header, installed_versions())
        check_table(header)
        places = homes(header, self._device)
        return [places[info.device] for info in header.segments]

    def check_call(self, header: RecordHeader, endpoint: str, call: _Lowered) -> tuple[EndpointSpec, str]:
        """Return the endpoint that a record is to be a result of, and the key.

        :param endpoint: its name, or ``""`` for the endpoint and the key that were exported.
        :raises EndpointNotFound: if the server has none of that name.
        :raises RecordError, ConfigurationError: if the record cannot be its result.
        """
        spec = self._registry.get(endpoint or header.endpoint)
        return spec, called(header, spec, call if endpoint else None)

    def adopt(
        self, session: str, header: RecordHeader, buffers: Sequence[str], endpoint: str, call: _Lowered, *, current: bool
    ) -> Generation:
        """Make an object of a record, whose bytes are in buffers of the session; these can be got no more.

        It is newer than every run that has begun, and older than those that will.

        :param current: whether the cache lists it; otherwise it is a candidate, on which the session has a lease.
        :raises RecordError, ConfigurationError: if it cannot be adopted; then the buffers are as they were.
        :raises BufferNotFound: if a buffer is not the session's.
        """
        devices = self.check(header)
        spec, key = self.check_call(header, endpoint, call)
        room = self._room(session, header, buffers, devices)
        record = self._record(header, room, spec)
        stored = self._objects.add(
            spec.name,
            key,
            record,
            spec.idle_ttl,
            run=self._number(),
            listed=current,
            managed=spec.managed,
            adopted=True,
            candidate=not current,
            host_copy=spec.host_copy,
            pinned=spec.pinned,
        )
        if not current:
            self._leases.grant(session, stored.object_id)
        for one in room:
            self._buffers.free(one.object_id)
        if stored.listed:
            self._generations.announce(stored)
        self._settle(stored.object_id)
        return self._generations.of(stored)

    def answer(
        self, session: str, header: RecordHeader, buffers: Sequence[str], spec: EndpointSpec, take: Callable[[Record], None]
    ) -> None:
        """Make the record of a room the result of a run, see :meth:`adopt`.

        :param spec: the endpoint of the run.
        :param take: gets the record, which belongs to it whatever it raises; then the buffers are as they were.
        """
        devices = self.check(header)
        check_code(header, spec)
        room = self._room(session, header, buffers, devices)
        take(self._record(header, room, spec))
        for one in room:
            self._buffers.free(one.object_id)

    def _record(self, header: RecordHeader, room: Sequence[StoredObject], spec: EndpointSpec) -> Record:
        """Return the record that lies in a room's buffers, by descriptors of its own."""
        chosen = accesses(header, spec.access)
        places = homes(header, self._device)
        skeleton, table = moved(header, places)
        segments = [one.record.segments[0] for one in room]
        for one, segment, access in zip(room, segments, chosen, strict=True):
            if segment.info.mechanism == "memfd":
                _seal(one, segment, access)
        return Record(
            skeleton,
            table,
            [segment.duplicate(access) for segment, access in zip(segments, chosen, strict=True)],
            header.nbytes,
            places[header.device],
            private_nbytes=header.private_nbytes,
        )

    def _room(self, session: str, header: RecordHeader, buffers: Sequence[str], devices: Sequence[str]) -> list[StoredObject]:
        """Return the buffers that hold the bytes of a record's segments."""
        if len(buffers) != len(header.segments) or len(set(buffers)) != len(buffers):
            raise RecordError(
                f"the record has {len(header.segments)} segments, and {len(set(buffers))} buffers were given for them: use the "
                f"room that allocate() has made for this record",
                reason="room",
            )
        room: list[StoredObject] = []
        for number, (object_id, info, device) in enumerate(zip(buffers, header.segments, devices, strict=True)):
            stored = self._objects.get(object_id)
            if stored is None or stored.kind != "buffer" or session not in self._leases.holders(object_id):
                raise BufferNotFound(
                    f"buffer {object_id[:100]} for segment {number} of the record is none that this session holds",
                    reason="unknown",
                )
            if stored.cold:
                raise RecordError(f"buffer {object_id} for segment {number} was evicted: resume its handle", reason="room")
            found = stored.record.segments[0].info if stored.record.segments else None
            if found is None or found.device != device or found.nbytes < info.nbytes or not stored.listed:
                raise RecordError(
                    f"buffer {object_id} is not for segment {number} of the record, which has {info.nbytes} bytes on {device}",
                    reason="room",
                )
            room.append(stored)
        return room

    def promote(self, object_id: str) -> Generation:
        """Make a candidate the current generation of its key.

        :raises StaleHandleError: if there is no such object.
        :raises RefreshError: if it is no candidate, its key was invalidated since, or a later one is current.
        """
        stored = self._objects.get(object_id)
        if stored is None or not stored.candidate:
            what = f"generation {stored.generation} of {stored.cache_key}" if stored is not None else "nothing that is there"
            raise RefreshError(f"object {object_id[:100]} is no candidate: it is {what}")
        current = self._objects.current(stored.cache_key)
        if stored.invalidated:
            raise RefreshError(
                f"{stored.cache_key} was invalidated after its generation {stored.generation} was prepared: prepare another one"
            )
        if current is not None and current.run > stored.run:
            raise RefreshError(
                f"generation {current.generation} of {stored.cache_key} (object {current.object_id}) is later than candidate "
                f"{stored.generation}, and current"
            )
        self._objects.promote(stored)
        self._generations.announce(stored)
        self._settle(stored.object_id)
        return self._generations.of(stored)


def _seal(buffer: StoredObject, segment: Segment, access: Access) -> None:
    """Seal host memory of a room as the record is shared.

    :raises RecordError: if it cannot be sealed for reading any more: it was shared for writing.
    """
    try:
        HOST.seal(segment.fileno(), access)
    except PermissionError as error:
        if access != "read_write":
            raise RecordError(
                f"buffer {buffer.object_id} is shared for writing, and the record for reading: use the room that allocate() "
                f"has made for this record, before it is evicted",
                reason="room",
            ) from error
