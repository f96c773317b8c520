"""State shared by the parts of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shared_rpc.errors import StaleHandleError
from shared_rpc.execution.device_memory import DeviceMemory
from shared_rpc.execution.endpoints import Registry
from shared_rpc.execution.run import Executor, Run
from shared_rpc.server.capacity import Capacity
from shared_rpc.server.observing import Listeners
from shared_rpc.server.sessions import Sessions
from shared_rpc.server.state import Clock
from shared_rpc.server.state.buffers import BufferTable
from shared_rpc.server.state.leases import Holder, LeaseTable
from shared_rpc.server.state.objects import ObjectStore, StoredObject
from shared_rpc.server.state.runs import RunTable
from shared_rpc.server.waiting import Waiter, Waits


@dataclass(eq=False, slots=True)
class State:
    """The tables of one server, shared by its parts. On the server's loop only.

    :param device: the id of the device of results.
    :param events: reports changes of objects and leases.
    :param wake_within: schedules the dropping of expired entries within so many seconds.
    """

    server_id: str
    device: str
    clock: Clock
    registry: Registry
    executor: Executor
    memory: DeviceMemory
    objects: ObjectStore
    leases: LeaseTable
    buffers: BufferTable
    sessions: Sessions
    capacity: Capacity
    events: Listeners
    wake_within: Callable[[float], None]
    runs: RunTable[Waiter] = field(default_factory=RunTable)
    #: The runs that wait for a source of records, by :attr:`Run.miss`.
    misses: dict[int, Run[Waiter]] = field(default_factory=dict)
    waits: Waits = field(default_factory=Waits)

    def stored(self, object_id: str) -> StoredObject:
        """Return an object.

        :raises StaleHandleError: if the server does not own it (any more).
        """
        stored = self.objects.get(object_id)
        if stored is None:
            raise StaleHandleError(f"the server {self.server_id} has no object {object_id[:100]}", reason="object_gone")
        return stored

    def release(self, session: Holder, object_ids: Iterable[str]) -> int:
        """Release one lease of a session or a task for each id; return the number of leases that existed."""
        released = [object_id for object_id in object_ids if self.leases.release(session, object_id)]
        self.settle(*released)
        return len(released)

    def drop(self, stored: StoredObject) -> None:
        """Drop an object whose bytes are lost, with all leases on it."""
        for holder in self.leases.holders(stored.object_id):
            while self.leases.release(holder, stored.object_id):
                pass
        if self.objects.get(stored.object_id) is stored:
            self.objects.unlist(stored)

    def waits_for(self, waiter: Waiter, users: dict[str, str] | None = None) -> str:
        """Describe the capacity that a waiter waits for and its holders, for error texts; ``""`` if it does not wait for any.

        :param users: see :meth:`Capacity.why`.
        """
        return self.capacity.why(waiter, users) or self.capacity.why(waiter.run, users)

    def settle(self, *object_ids: str) -> None:
        """Drop objects without leases or listing, after leases on these changed or they were added."""
        for object_id in object_ids:
            lingers = self.buffers.settle(object_id)
            if lingers is not None:
                self.wake_within(lingers)
        self.objects.settle(*object_ids)
        self.capacity.changed()
        for object_id in object_ids:
            stored = self.objects.get(object_id)
            if stored is not None and stored.idle_ttl is not None:
                self.wake_within(stored.idle_ttl)
