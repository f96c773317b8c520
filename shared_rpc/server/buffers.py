"""Raw buffers of a server: reserved, allocated, kept as objects. Needs no torch, and on a GPU no CUDA context."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from shared_rpc.errors import ConfigurationError, ConnectionClosed, SharedRPCError
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.execution.outcomes import Failure
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.buffers import Extent
from shared_rpc.protocol.infos import DeviceInfo
from shared_rpc.protocol.records import ONE_TENSOR, StorageEntry, TensorEntry, TensorTable, Tier, list_of_tensors
from shared_rpc.protocol.specs import DeviceSpec
from shared_rpc.server.device_room import Room
from shared_rpc.server.runs import Delivery, Restorer, Waiter, tell
from shared_rpc.server.state.buffers import BufferTable

__all__ = ["Buffers"]

T = TypeVar("T")

#: Seconds. A century: timers do not take more.
_LONGEST = 100 * 365 * 86400.0


class Buffers:
    """Requests about buffers and devices. On the loop only.

    :param device: the id of the server's device.
    :param memory: where they are made.
    :param wake_within: called when a buffer may expire in so many seconds.
    :param restorer: restores buffers that are cold.
    :param copied: returns the bytes of copies of a device's objects, by tier.
    """

    def __init__(
        self,
        device: str,
        table: BufferTable,
        room: Room,
        memory: DeviceMemory,
        wake_within: Callable[[float], None],
        restorer: Restorer,
        copied: Callable[[str], dict[Tier, int]],
    ) -> None:
        self.table = table
        self._device = device
        self._memory = memory
        self._room = room
        self._wake_within = wake_within
        self._restorer = restorer
        self._copied = copied
        #: The tasks of requests.
        self._tasks: dict[Waiter, asyncio.Task[None]] = {}
        #: Buffers that are being allocated.
        self._coming = 0
        self._stopped = False

    def create(self, waiter: Waiter, message: m.CreateBuffer) -> None:
        """Make a buffer that the waiter's session holds. The waiter is notified exactly once, perhaps before this returns."""
        try:
            extent = Extent.of(message.shape, message.dtype)
            _check_terms(message.ttl, message.max_accesses, message.keep)
        except SharedRPCError as error:
            tell(waiter, Failure.of(error))
            return
        self._begin(waiter, self._create(waiter, message, extent), lambda made: tell(waiter, made))

    async def _create(self, waiter: Waiter, message: m.CreateBuffer, extent: Extent) -> Delivery:
        device = await self._memory.device(message.device or self._device)
        self.table.check_capacity(self._coming)
        size = -(-extent.nbytes // device.granularity) * device.granularity
        self._coming += 1
        try:
            async with self._room.reserve(waiter, {device.id: size}, descriptors=1, totals={device.id: device.total}):
                record = await self._new_record(extent, device.id, room=message.room)
        finally:
            self._coming -= 1
        stored = self.table.add(waiter.session, record, message.ttl, message.max_accesses, keep=message.keep)
        if message.ttl is not None:
            self._wake_within(message.ttl)
        return Delivery(stored.record, None, stored, True)

    def keep(self, waiter: Waiter, segments: Sequence[Segment], linger: float) -> None:
        """List a buffer over memory that is there, which the waiter's session holds; the waiter is notified at once.

        :param segments: borrowed; the buffer has descriptors of its own, and the memory is mapped as it was shared.
        :param linger: see :meth:`BufferTable.add`.
        """
        if not 0 <= linger <= _LONGEST:
            raise ConfigurationError(f"linger={linger!r}: use seconds from 0 on, and less than a century")
        self.table.check_capacity(self._coming)
        record = _whole(segments)
        try:
            stored = self.table.add(waiter.session, record, None, None, linger=linger)
        except BaseException:
            record.close()
            raise
        tell(waiter, Delivery(stored.record, None, stored, True))

    def get(self, waiter: Waiter, object_id: str) -> None:
        """Hand a buffer out, at once if it is on its device.

        :raises BufferNotFound: if it is not listed.
        """
        listed = self.table.listed(object_id)
        if listed is not None and (listed.cold or self._restorer.must_wait(waiter, listed)):
            self._restorer.when_warm(waiter, listed, lambda: self.get(waiter, object_id))
            return
        stored = self.table.get(waiter.session, object_id)
        tell(waiter, Delivery(stored.record, None, stored, True))

    def list_devices(self, waiter: Waiter, answer: Callable[[list[DeviceInfo]], object]) -> None:
        """Call ``answer`` with the facts of each device; the waiter is notified only of a failure."""
        self._begin(waiter, self._memory.devices(), lambda found: answer([self._shown(*each) for each in found]))

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that no longer waits; the buffer made for it is dropped."""
        task = self._tasks.pop(waiter, None)
        if task is not None:
            task.cancel()

    def stop(self) -> None:
        """Notify all waiters. Later requests are refused."""
        self._stopped = True
        for waiter in tuple(self._tasks):
            self.leave(waiter)
            tell(waiter, _gone())

    def _shown(self, facts: DeviceSpec, free: int | None) -> DeviceInfo:
        return {
            "id": facts.id,
            "kind": facts.kind,
            "name": facts.name,
            "total": facts.total,
            "free": free,
            "used": self._room.used(facts.id),
            "limit": self._room.limit(facts.id),
            "copies": self._copied(facts.id),
        }

    async def _new_record(self, extent: Extent, device: str, *, room: bool) -> Record:
        segments = [await self._memory.allocate(device, extent.nbytes)] if extent.nbytes else []
        for segment in segments:
            if segment.info.mechanism == "memfd" and not room:
                HOST.seal(segment.fileno(), "read_write")
        storage = StorageEntry(0 if segments else -1, 0, extent.nbytes)
        tensor = TensorEntry(0, extent.dtype, 0, extent.shape, extent.strides)
        table = TensorTable((device,), (storage,), (tensor,))
        return Record(ONE_TENSOR, msgspec.msgpack.encode(table), segments, extent.nbytes, device, private_nbytes=0)

    def _begin(self, waiter: Waiter, work: Coroutine[Any, Any, T], then: Callable[[T], object]) -> None:
        """Do some work in a task, and ``then`` with its result. The waiter gets errors of both, unless it leaves before."""
        if self._stopped:
            work.close()
            tell(waiter, _gone())
            return

        async def attempt() -> None:
            try:
                then(await work)
            except Exception as error:  # no free descriptor, or a failing driver
                tell(waiter, Failure.unexpected(error, "the memory of a buffer cannot be made"))
            finally:
                self._tasks.pop(waiter, None)

        self._tasks[waiter] = asyncio.get_running_loop().create_task(attempt())


def _whole(segments: Sequence[Segment]) -> Record:
    """Return a record of all bytes of some segments: a flat tensor for each, in a list."""
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
    own: list[Segment] = []
    try:
        own += (segment.duplicate() for segment in segments)
    except BaseException:
        for segment in own:
            segment.close()
        raise
    return Record(list_of_tensors(len(own)), msgspec.msgpack.encode(table), own, sum(sizes), private_nbytes=0)


def _check_terms(ttl: float | None, max_accesses: int | None, keep: bool) -> None:
    if keep and ttl is not None:
        raise ConfigurationError(f"keep=True keeps a buffer until it is freed, and ttl={ttl!r} for so many seconds: use one")
    if ttl is not None and not 0 < ttl <= _LONGEST:
        raise ConfigurationError(f"ttl={ttl!r}: use seconds, more than 0 and less than a century, or None for no end")
    if max_accesses is not None and max_accesses < 1:
        raise ConfigurationError(f"max_accesses={max_accesses!r}: use a number from 1 on, or None for no limit")


def _gone() -> Failure:
    return Failure.of(ConnectionClosed(f"the server (pid {os.getpid()}) was stopped"))
