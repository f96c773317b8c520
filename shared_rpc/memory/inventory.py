"""Inventory of the devices that a server has memory on. Needs no torch, and no CUDA context."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, cast

from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.devices import device_kind
from shared_rpc.memory.segments import gpu_support
from shared_rpc.protocol.specs import DeviceSpec

if TYPE_CHECKING:
    from shared_rpc.memory.backends.cuda import CudaBackend


def devices_of(device: str) -> tuple[str, ...]:
    """Return the ids of the devices that a server of ``device`` makes memory on.

    A GPU's server: every GPU that its process sees, and the host. The host's: the host alone, so that it never loads CUDA.
    """
    if device == "cpu":
        return ("cpu",)
    with gpu_support():
        from shared_rpc.memory.backends.cuda import visible_gpus
    return (*visible_gpus(), "cpu")


@functools.cache
def facts_of(device: str) -> DeviceSpec:
    """Describe a device of :func:`devices_of`. The first time this may wait for the driver.

    :raises CapabilityError: if this process cannot use that device.
    """
    kind, backend = device_kind(device), backend_for(device)
    if kind == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceSpec(device, kind, "host memory", total, backend.granularity)
    gpu = cast("CudaBackend", backend)
    return DeviceSpec(device, kind, gpu.name, gpu.total, backend.granularity)


def free_bytes(device: str) -> int | None:
    """Return the free bytes of a device, None if they are not known."""
    if device != "cpu":
        return cast("CudaBackend", backend_for(device)).free_bytes()
    with open("/proc/meminfo", encoding="ascii") as file:
        amounts = dict(line.split(":") for line in file)
    return int(amounts["MemAvailable"].split()[0]) * 1024
