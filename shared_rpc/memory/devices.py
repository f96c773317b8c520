"""Devices: their names (the users', those on the wire, and torch's), their memory, and configured limits of it.

On the wire and in socket paths a device is ``"cpu"`` or the UUID of a GPU, never an index, because
``CUDA_VISIBLE_DEVICES`` may differ between processes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.memory.backends.choice import backend_for
from shared_rpc.memory.segments import gpu_support
from shared_rpc.protocol.specs import DeviceSpec

if TYPE_CHECKING:
    import torch

    from shared_rpc.memory.backends.cuda import CudaBackend


def device_id(device: str) -> str:
    """Return the id of ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` or ``"GPU-<uuid>"``.

    ``"auto"`` is the current CUDA device where ``torch.cuda.is_available()``, else the host.

    :raises ConfigurationError: for anything else.
    :raises CapabilityError: for a GPU that does not exist.
    """
    check_name(device)
    if device == "cpu" or device.startswith("GPU-"):
        return device
    _, _, index = device.partition(":")
    import torch

    if not torch.cuda.is_available():
        if device == "auto":
            return "cpu"
        raise CapabilityError(f"device={device!r}, but torch {torch.__version__} finds no CUDA device: use device='cpu'")
    with gpu_support():
        from shared_rpc.memory.backends.cuda import uuid_of, visible_gpus
    ordinal = int(index) if index else torch.cuda.current_device()
    if ordinal >= len(visible_gpus()):
        raise CapabilityError(f"device={device!r}, but this process sees {len(visible_gpus())} GPUs")
    return uuid_of(ordinal)


def check_name(device: str) -> None:
    """Raise :class:`ConfigurationError` for an invalid name of a device, see :func:`device_id`. Accesses no GPU."""
    kind, _, index = device.partition(":")
    if device in ("auto", "cpu", "cuda") or device.startswith("GPU-"):
        return
    if kind != "cuda" or not index.isdecimal():
        raise ConfigurationError(f"device={device!r}: use 'auto', 'cpu', 'cuda', 'cuda:<index>' or 'GPU-<uuid>'")


@functools.cache
def id_of(device: torch.device) -> str:
    """Return the id of a tensor's device."""
    return device_id(str(device))


def device_kind(device: str) -> str:
    """Return ``"cpu"`` or ``"cuda"``, the type of torch's device."""
    return "cpu" if device == "cpu" else "cuda"


def device_tag(device: str) -> str:
    """Return the device's part of a socket path: ``"cpu"``, or the first eight hex digits of the GPU's UUID."""
    return device if device == "cpu" else device.removeprefix("GPU-")[:8]


@functools.cache
def torch_device(device: str) -> torch.device:
    """Return the device of tensors over memory of that device: for a GPU that is not visible here a peer with access to it."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    with gpu_support():
        from shared_rpc.memory.backends.cuda import ordinal_of
    return torch.device("cuda", ordinal_of(device))


def devices_of(device: str) -> tuple[str, ...]:
    """Return the ids of the devices on which a server of ``device`` allocates memory.

    A GPU's server: every GPU visible to its process, and the host. The host's: only the host, so that it never loads CUDA.
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
    """Return the free bytes of a device, None if unknown."""
    if device != "cpu":
        return cast("CudaBackend", backend_for(device)).free_bytes()
    with open("/proc/meminfo", encoding="ascii") as file:
        amounts = dict(line.split(":") for line in file)
    return int(amounts["MemAvailable"].split()[0]) * 1024


# Configured limits.


def resolve_quotas(quotas: Mapping[str, int | float], device: str) -> dict[str, int]:
    """Return the configured quotas in bytes, by device id.

    :param device: the id of the server's device.
    :raises ConfigurationError: for a device of another server, and for an amount that is neither bytes nor a fraction.
    """
    resolved: dict[str, int] = {}
    for name, amount in quotas.items():
        what = f"quota {name}={amount!r}"
        try:
            chosen = device_id(name)
        except (ConfigurationError, CapabilityError) as error:
            raise ConfigurationError(f"{what}: {error}") from error
        if chosen not in devices_of(device):
            raise ConfigurationError(f"{what}: use a device of this server: {', '.join(devices_of(device))}")
        if chosen in resolved:
            raise ConfigurationError(f"{what}: another name of {chosen} has a quota already")
        resolved[chosen] = _in_bytes(what, amount, chosen)
    return resolved


def resolve_host_quota(amount: float | None) -> int | None:
    """Return the limit of host copies in bytes, None for no limit.

    :raises ConfigurationError: for an amount that is neither bytes nor a fraction of the host's memory.
    """
    return _in_bytes(f"host_quota={amount!r}", amount, "cpu") if amount is not None else None


def _in_bytes(what: str, amount: float, device: str) -> int:
    if isinstance(amount, float) and 0 < amount <= 1:
        return int(facts_of(device).total * amount)
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    raise ConfigurationError(f"{what}: use bytes as an int, or a fraction of the device's memory as a float up to 1.0")
