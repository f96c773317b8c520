"""Where a server makes the memory of its buffers."""

from __future__ import annotations

from typing import Protocol

from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.inventory import devices_of, facts_of, free_bytes
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.specs import DeviceSpec

__all__ = ["DeviceMemory", "LocalMemory"]


class DeviceMemory(Protocol):
    """The devices of a server. All of it may wait for a driver, and is called in a thread."""

    def devices(self) -> tuple[str, ...]:
        """Their ids."""

    def facts(self, device: str) -> DeviceSpec:
        """What does not change of one of them."""

    def free(self, device: str) -> int | None:
        """Bytes of one that nobody uses now, None where that is not known."""

    def allocate(self, device: str, nbytes: int) -> Segment:
        """New zeroed memory.

        :raises CapabilityError: if the device has not enough.
        """


class LocalMemory:
    """Made in this process. On a GPU that needs no CUDA context."""

    def __init__(self, device: str) -> None:
        self._device = device

    def devices(self) -> tuple[str, ...]:
        """See :class:`DeviceMemory`."""
        return devices_of(self._device)

    def facts(self, device: str) -> DeviceSpec:
        """See :class:`DeviceMemory`."""
        return facts_of(device)

    def free(self, device: str) -> int | None:
        """See :class:`DeviceMemory`."""
        return free_bytes(device)

    def allocate(self, device: str, nbytes: int) -> Segment:
        """See :class:`DeviceMemory`."""
        # A safe point: what was dropped to make room goes back to the device before more is asked of it.
        MAPPINGS.drain()
        return backend_for(device).create(nbytes)
