"""Raw buffers of a server: reserved, allocated, kept as objects. Needs no torch, and on a GPU no CUDA context."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared_rpc.errors import ConfigurationError, SegmentNotFound
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.buffers import Extent
from shared_rpc.protocol.infos import DeviceInfo
from shared_rpc.protocol.records import ONE_TENSOR, StorageEntry, TensorEntry, TensorTable, list_of_tensors
from shared_rpc.protocol.specs import DeviceSpec
from shared_rpc.server.requests import Answer, Caller, handles
from shared_rpc.server.shared import State
from shared_rpc.server.state.objects import StoredObject
from shared_rpc.server.tiers import Tiers
from shared_rpc.server.waiting import Delivery

#: A century in seconds: the maximum of a timer.
_LONGEST = 100 * 365 * 86400.0


class Buffers:
    """Requests about buffers and devices. On the loop only."""

    def __init__(self, state: State, tiers: Tiers) -> None:
        self._state = state
        self._tiers = tiers
        self.table = state.buffers

    @handles(m.CreateBuffer)
    async def create(self, caller: Caller, message: m.CreateBuffer) -> None:
        """Allocate a buffer that the caller's session holds."""
        extent = Extent.of(message.shape, message.dtype)
        _check_terms(message.ttl, message.keep)
        state = self._state
        device = await state.memory.device(message.device or state.device)
        self.table.check_name(message.name)
        state.capacity.require_descriptors(1)
        sizes = {device.id: -(-extent.nbytes // device.granularity) * device.granularity}
        with await state.capacity.request(caller.waiter, sizes, totals={device.id: device.total}).wait():
            record = await self._new_record(extent, device.id, for_record=message.for_record)
        try:
            self.table.check_name(message.name)  # another request may have taken it
        except BaseException:
            record.close()
            raise
        stored = self.table.add(caller.session, record, message.ttl, keep=message.keep, name=message.name)
        if message.ttl is not None:
            state.wake_within(message.ttl)
        if not caller.deliver(Delivery(stored.record, None, stored, True)):
            self.table.free(stored.object_id)  # no client will ever know its id

    @handles(m.KeepSegments)
    def keep(self, caller: Caller, message: m.KeepSegments) -> None:
        """List a buffer over existing memory, held by the caller's session.

        It gets its own descriptors, and the memory is mapped as it was shared.
        """
        found = {segment_id: self._state.objects.segment(segment_id) for segment_id in message.segment_ids}
        unknown = [segment_id[:100] for segment_id, segment in found.items() if segment is None]
        if unknown:
            raise SegmentNotFound(f"this server does not have the segments {', '.join(unknown)[:1000]} any more", unknown)
        if not 0 <= message.linger <= _LONGEST:
            raise ConfigurationError(f"linger={message.linger!r}: use seconds from 0 on, and less than a century")
        record = _whole([segment for segment in found.values() if segment is not None])
        _deliver(caller, self.table.add(caller.session, record, None, linger=message.linger))

    @handles(m.GetBuffer)
    def get(self, caller: Caller, message: m.GetBuffer) -> Answer:
        """Send a buffer to the caller, at once if it is on its device.

        :raises BufferNotFound: if it is not listed.
        """
        object_id = self.table.named(message.name) if message.name else message.object_id
        return self._tiers.serve(
            caller,
            lambda: self.table.listed(object_id),
            lambda stored: _deliver(caller, self.table.get(caller.session, object_id)),
        )

    @handles(m.FreeBuffer)
    def free(self, caller: Caller, message: m.FreeBuffer) -> m.Answer:
        """Unlist a buffer for all processes."""
        freed = self.table.free(message.object_id)
        if message.release:
            self._state.release(caller.session, [message.object_id])
        return m.Answer.of(freed)

    @handles(m.ListDevices)
    async def list_devices(self, caller: Caller, message: m.ListDevices) -> m.Answer:
        """Describe each device."""
        return m.Answer.of([self._shown(*each) for each in await self._state.memory.devices()])

    def _shown(self, facts: DeviceSpec, free: int | None) -> DeviceInfo:
        return {
            "id": facts.id,
            "kind": facts.kind,
            "name": facts.name,
            "total": facts.total,
            "free": free,
            "used": self._state.capacity.used(facts.id),
            "limit": self._state.capacity.limit(facts.id),
            "copies": self._state.objects.copies.usage(facts.id),
        }

    async def _new_record(self, extent: Extent, device: str, *, for_record: bool) -> Record:
        segments = [await self._state.memory.allocate(device, extent.nbytes)] if extent.nbytes else []
        for segment in segments:
            if segment.info.mechanism == "memfd" and not for_record:
                HOST.seal(segment.fileno(), "read_write")
        storage = StorageEntry(0 if segments else -1, 0, extent.nbytes)
        tensor = TensorEntry(0, extent.dtype, 0, extent.shape, extent.strides)
        table = TensorTable((device,), (storage,), (tensor,))
        return Record(ONE_TENSOR, msgspec.msgpack.encode(table), segments, extent.nbytes, device, private_nbytes=0)


def _deliver(caller: Caller, stored: StoredObject) -> None:
    caller.deliver(Delivery(stored.record, None, stored, True))


def _whole(segments: Sequence[Segment]) -> Record:
    """Return a record of all bytes of some segments, as a list with a flat tensor for each."""
    devices = tuple(dict.fromkeys(segment.info.device for segment in segments))
    sizes = [segment.info.nbytes for segment in segments]
    table = TensorTable(
        devices,
        tuple(
            StorageEntry(number, 0, segment.info.nbytes, devices.index(segment.info.device))
            for number, segment in enumerate(segments)
        ),
        tuple(TensorEntry(number, "uint8", 0, (nbytes,), (1,)) for number, nbytes in enumerate(sizes)),
    )
    own = [segment.duplicate() for segment in segments]
    return Record(list_of_tensors(len(own)), msgspec.msgpack.encode(table), own, sum(sizes), private_nbytes=0)


def _check_terms(ttl: float | None, keep: bool) -> None:
    if keep and ttl is not None:
        raise ConfigurationError(f"keep=True keeps a buffer until it is freed, and ttl={ttl!r} for so many seconds: use one")
    if ttl is not None and not 0 < ttl <= _LONGEST:
        raise ConfigurationError(f"ttl={ttl!r}: use seconds, more than 0 and less than a century, or None for no end")
