"""How much memory there is in use: by all processes of a verification on the host, or of a GPU."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from shared_rpc.verification.clients import ClientFailed, RemoteClient
from shared_rpc.verification.processes import memory_of, segment_bytes
from shared_rpc.verification.stage import Stage

__all__ = ["DeviceGauge", "Gauge", "HostGauge"]


class Gauge(Protocol):
    """Of one device."""

    #: How the memory is measured, for people.
    method: str
    #: Seconds for memory to come back after a process was killed.
    patience: float
    #: Bytes that each process may use beside the model, and those by which a reading of the segments may be off.
    noise: int
    blur: int

    def used(self) -> int:
        """Bytes in use by all processes together, what they share counted once."""

    def segments(self) -> int:
        """Bytes in use, all those of shared segments among them, and as little else as possible."""


class HostGauge:
    """The kernel's own accounts of every process of the verification."""

    method = "Pss of all processes but for the builder's own heap"
    patience = 1.0
    #: Pages that it had in common with those it was forked with until it wrote to them.
    noise = 2 << 20
    blur = 0

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def used(self) -> int:
        """See :class:`Gauge`. What the allocator of the process keeps that has built the model is no part of it."""
        return memory_of(self._stage.pids(), builder=self._stage.worker_pid())

    def segments(self) -> int:
        """Of anonymous files that are open or mapped in any process."""
        return segment_bytes(self._stage.pids())


class DeviceGauge:
    """What the driver says is in use on a GPU, asked of a process whose context is there before and after.

    Contexts are there before the first reading; what another program allocates meanwhile is counted too.
    """

    method = "cudaMemGetInfo, contexts there before"
    #: The driver ends the context of a process that was killed, and then its memory is free.
    patience = 3.0
    #: Kernels that are loaded when they are first needed, and what a forward pass leaves with torch's allocator.
    noise = 64 << 20
    blur = 64 << 20

    def __init__(self, stage: Stage, device: str) -> None:
        self._stage = stage
        self._device = device
        self._probe: RemoteClient | None = None

    def used(self) -> int:
        """See :class:`Gauge`."""
        if self._probe is None:
            self._probe = self._stage.connect()
        try:
            return int(self._probe.ask("used", device=self._device)["used"])
        except ClientFailed:
            self.close()
            raise

    def segments(self) -> int:
        """Segments are what is in use beside contexts."""
        return self.used()

    def close(self) -> None:
        """End the process that is asked."""
        if self._probe is not None:
            with suppress(OSError):
                self._probe.close()
            self._probe = None
