"""The memory that a server makes buffers of."""

from __future__ import annotations

from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.inventory import devices_of, facts_of, free_bytes
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.specs import DeviceSpec

__all__ = ["DeviceMemory"]


class DeviceMemory:
    """The devices of a server, whose memory this process makes; on a GPU that needs no CUDA context.

    All of it may wait for a driver, and is called in a thread.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def devices(self) -> tuple[str, ...]:
        """Return the ids of the devices."""
        return devices_of(self._device)

    def facts(self, device: str) -> DeviceSpec:
        """Return the constant facts of a device."""
        return facts_of(device)

    def free(self, device: str) -> int | None:
        """Return the free bytes of a device, None if they are not known."""
        return free_bytes(device)

    def allocate(self, device: str, nbytes: int) -> Segment:
        """Make zeroed memory.

        :raises CapabilityError: if the device has not enough.
        """
        # A safe point: memory dropped to make room is returned to the device before more is allocated.
        MAPPINGS.drain()
        return backend_for(device).create(nbytes)
