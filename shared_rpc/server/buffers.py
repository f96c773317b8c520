"""Raw buffers of a server: asked for, made in a thread, kept as objects. Needs no torch, and on a GPU no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from shared_rpc.errors import CapabilityError, ConfigurationError, ConnectionClosed, SharedRPCError
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.execution.outcomes import Completed, Failure
from shared_rpc.execution.threads import Job, WorkerThreads
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.buffers import Extent
from shared_rpc.protocol.infos import DeviceInfo
from shared_rpc.protocol.records import ONE_TENSOR, StorageEntry, TensorEntry, TensorTable, Tier, list_of_tensors
from shared_rpc.protocol.specs import DeviceSpec
from shared_rpc.server.device_room import Room, SetAside
from shared_rpc.server.runs import Delivery, Restorer, Waiter, tell
from shared_rpc.server.state.buffers import BufferTable

__all__ = ["Buffers"]

#: Seconds. A century: timers do not take more.
_LONGEST = 100 * 365 * 86400.0


class Buffers:
    """Requests about buffers and devices. On the loop only; memory is made, and drivers are asked, in one thread.

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
        self._threads = WorkerThreads(1)
        #: Waiters for jobs of the thread.
        self._waiting: set[Waiter] = set()
        #: Waiters for room.
        self._asking: set[Waiter] = set()
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
        device = message.device or self._device
        self._work(
            waiter,
            lambda: Completed(None, self._facts(device)),
            lambda found: self._allocate(waiter, message, extent, found.live),
        )

    def _allocate(self, waiter: Waiter, message: m.CreateBuffer, extent: Extent, facts: DeviceSpec) -> None:
        self.table.check_capacity(self._coming)
        size = -(-extent.nbytes // facts.granularity) * facts.granularity
        self._coming += 1
        self._asking.add(waiter)
        self._room.ask(
            waiter,
            {facts.id: size},
            lambda aside: self._make(waiter, message, extent, facts, aside),
            lambda failure: self._refuse(waiter, failure),
            descriptors=1,
            totals={facts.id: facts.total},
        )

    def _refuse(self, waiter: Waiter, failure: Failure) -> None:
        self._coming -= 1
        self._asking.discard(waiter)
        tell(waiter, failure)

    def _make(self, waiter: Waiter, message: m.CreateBuffer, extent: Extent, facts: DeviceSpec, aside: SetAside) -> None:
        """Make a buffer for which there is room."""
        self._asking.discard(waiter)

        def ended() -> None:
            self._coming -= 1
            self._room.redeem(aside)

        def keep(made: Completed) -> None:
            assert made.record is not None, "a buffer has a record"
            stored = self.table.add(waiter.session, made.record, message.ttl, message.max_accesses, keep=message.keep)
            if message.ttl is not None:
                self._wake_within(message.ttl)
            tell(waiter, Delivery(stored.record, None, stored, True))

        self._work(waiter, lambda: Completed(self._new_record(extent, facts.id, room=message.room), None), keep, ended)

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

        def look() -> Completed:
            return Completed(
                None, [(self._memory.facts(device), self._memory.free(device)) for device in self._memory.devices()]
            )

        def show(found: Completed) -> None:
            answer([self._shown(facts, free) for facts, free in found.live])

        self._work(waiter, look, show)

    def leave(self, waiter: Waiter) -> None:
        """Forget a waiter that no longer waits; the buffer made for it is dropped."""
        self._waiting.discard(waiter)
        if waiter in self._asking:
            self._asking.discard(waiter)
            self._room.leave(waiter)
            self._coming -= 1

    def stop(self) -> None:
        """Notify all waiters. Later requests are refused."""
        self._stopped = True
        for waiter in (*self._waiting, *self._asking):
            self.leave(waiter)
            tell(waiter, _gone())

    def close(self) -> None:
        """End the thread: the loop has ended."""
        self._threads.close()

    def _facts(self, device: str) -> DeviceSpec:
        known = self._memory.devices()
        if device not in known:
            raise CapabilityError(f"this server allocates no memory on {device[:100]}: use one of {', '.join(known)}")
        return self._memory.facts(device)

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

    def _new_record(self, extent: Extent, device: str, *, room: bool) -> Record:
        segments = [self._memory.allocate(device, extent.nbytes)] if extent.nbytes else []
        for segment in segments:
            if segment.info.mechanism == "memfd" and not room:
                HOST.seal(segment.fileno(), "read_write")
        storage = StorageEntry(0 if segments else -1, 0, extent.nbytes)
        tensor = TensorEntry(0, extent.dtype, 0, extent.shape, extent.strides)
        table = TensorTable((device,), (storage,), (tensor,))
        return Record(ONE_TENSOR, msgspec.msgpack.encode(table), segments, extent.nbytes, device, private_nbytes=0)

    def _work(
        self,
        waiter: Waiter,
        work: Callable[[], Completed],
        then: Callable[[Completed], None],
        ended: Callable[[], None] | None = None,
    ) -> None:
        """Do ``work`` in the thread, and ``then`` on the loop; ``ended`` before that, whatever has become of it.

        The waiter gets errors of both. If the waiter has left meanwhile, the work is skipped or its result dropped.
        """
        if self._stopped:
            tell(waiter, _gone())
            return
        self._waiting.add(waiter)

        def attempt() -> Completed | Failure:
            if waiter not in self._waiting:
                return _gone()
            try:
                return work()
            except Exception as error:  # no free descriptor, or a failing driver
                return Failure.unexpected(error, "the memory of a buffer cannot be made")

        def done(outcome: Completed | Failure) -> None:
            if ended is not None:
                ended()
            if waiter not in self._waiting:
                if isinstance(outcome, Completed) and outcome.record is not None:
                    outcome.record.close()
                return
            self._waiting.discard(waiter)
            if isinstance(outcome, Failure):
                tell(waiter, outcome)
                return
            try:
                then(outcome)
            except Exception as error:
                tell(waiter, Failure.unexpected(error, "a buffer cannot be kept"))

        self._threads.start(Job(attempt, done))


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
