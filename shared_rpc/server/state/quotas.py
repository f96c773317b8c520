"""Quotas of memory of each device, and of descriptors, that a server's objects may take, results and buffers together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from shared_rpc.errors import CapabilityError, ServerBusy
from shared_rpc.server.state.leases import LeaseTable
from shared_rpc.server.state.objects import ObjectStore
from shared_rpc.server.state.tasks import TASK_SESSION

__all__ = ["Quotas"]


_QUOTA, _ALL = "the quota (--quota, or Server(quotas=...))", "the device's memory"


class Quotas:
    """The limits, the used bytes, and the bytes reserved for memory that is being made.

    A dropped object's memory counts as free at once, though freeing it may take time: see :mod:`shared_rpc.execution.freeing`.

    Where a limit would be exceeded, cached objects without holders make room, if that is enough; else nothing is
    evicted and the asker is refused.

    :param limits: bytes, by the device's id.
    :param pid_of: the process behind a session, for people.
    """

    def __init__(
        self, objects: ObjectStore, leases: LeaseTable, limits: Mapping[str, int], pid_of: Callable[[str], int]
    ) -> None:
        self._objects = objects
        self._leases = leases
        self._limits = dict(limits)
        self._pid_of = pid_of
        self._promised: Counter[str] = Counter()

    @property
    def limits(self) -> Mapping[str, int]:
        """The quotas in bytes, by device."""
        return self._limits

    def limit(self, device: str) -> int | None:
        """Return the quota of a device in bytes, None where there is none."""
        return self._limits.get(device)

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replace the limits; objects that exceed one stay until there is a need for room."""
        self._limits = dict(limits)

    def used(self, device: str) -> int:
        """Return the bytes of a device that objects take, or are promised."""
        return self._objects.used(device) + self._promised[device]

    def promise(self, device: str, nbytes: int, total: int | None = None) -> None:
        """Set memory aside that is about to be made, until :meth:`redeem`.

        :param total: the device's memory, which is the limit without a quota; None for no limit then.
        :raises CapabilityError: if there can never be so much.
        :raises ServerBusy: if there is not so much now.
        """
        quota = self._limits.get(device)
        if quota is not None and (total is None or quota <= total):
            self._require(device, nbytes, quota, _QUOTA)
        elif total is not None:
            self._require(device, nbytes, total, _ALL)
        self._promised[device] += nbytes

    def redeem(self, device: str, nbytes: int) -> None:
        """Note that promised memory was made, and is an object's now, or that it was not."""
        self._promised[device] -= nbytes

    def _require(self, device: str, nbytes: int, limit: int, what: str) -> None:
        if nbytes > limit:
            raise CapabilityError(f"{nbytes} bytes on {device} are more than {what}, {limit}: ask for less")
        if nbytes == 0 or self.used(device) + nbytes <= limit:
            return
        excess = self.used(device) + nbytes - limit
        if not self._objects.make_room(excess, lambda info: info.nbytes if info.device == device else 0):
            raise ServerBusy(
                f"{nbytes} bytes on {device} do not fit: {what} is {limit}, and {self.used(device)} are in use: "
                f"{self._users(device)}. Release handles, free buffers, or ask for less"
            )

    def relieve(self) -> bool:
        """Drop some cached objects without holders for their descriptors; False if there are none."""
        return any(self._objects.make_room(count, lambda info: 1, of_copy=1) for count in (64, 8, 1))

    def require_descriptors(self, count: int) -> None:
        """Check that objects may have so many descriptors more; cached objects without holders make room.

        :raises ServerBusy: if they may not.
        """
        kept = self._objects.descriptors
        excess = kept.used + count - kept.limit
        if count == 0 or excess <= 0 or self._objects.make_room(excess, lambda info: 1, of_copy=1):
            return
        raise ServerBusy(
            f"keeping the object needs {count} more file descriptors: {kept.used} of the {kept.limit} for objects, half of the "
            f"process's limit, are in use: {self.descriptor_users()}. Release handles, fetch results of "
            f"tasks, free buffers, or raise the limit (ulimit -n, LimitNOFILE= of a service)"
        )

    def descriptor_users(self) -> str:
        """Describe the holders, for people."""
        counts: Counter[str] = Counter()
        clients: Counter[str] = Counter()
        for stored in self._objects:
            holders = self._leases.holders(stored.object_id)
            held = [session for session in holders if not session.startswith(TASK_SESSION)]
            clients.update(held)
            if held:
                counts["objects with leases"] += 1
            elif holders:
                counts["unfetched results of tasks"] += 1
            elif stored.kind == "buffer":
                counts["buffers without holders"] += 1
        texts = [f"{count} by {what}" for what, count in counts.most_common()]
        texts += [f"pid {self._pid_of(session)} holds the most, {count}" for session, count in clients.most_common(1)]
        return ", ".join(texts) or "objects of other servers of this process, and revision pages"

    def _users(self, device: str) -> str:
        # By segment id: objects made over a buffer lie in its segment.
        sessions: defaultdict[str, dict[str, int]] = defaultdict(dict)
        alone: dict[str, int] = {}
        for stored in self._objects:
            infos = [segment.info for segment in stored.record.segments if not segment.closed]
            sizes = {info.id: info.nbytes for info in infos if info.device == device}
            holders = self._leases.holders(stored.object_id)
            for session in holders:
                sessions[session].update(sizes)
            if stored.kind == "buffer" and not holders:
                alone.update(sizes)
        held = Counter({session: sum(sizes.values()) for session, sizes in sessions.items() if sizes})
        idle = sum(nbytes for name, nbytes in alone.items() if not any(name in sizes for sizes in sessions.values()))
        texts = [f"pid {self._pid_of(session)} holds the most, {nbytes} bytes" for session, nbytes in held.most_common(1)]
        return ", and ".join([*texts, f"{idle} bytes are buffers without holders"])
