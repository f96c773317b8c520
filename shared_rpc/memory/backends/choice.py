"""Choice of the mechanism with which this process allocates segments of a GPU.

The choice is made once for each GPU of a process: the first mechanism of :data:`PREFERENCE` that the GPU supports, or the one
given by a provider. Consumers have no choice: a segment has its mechanism.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, get_args

import msgspec

from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.forks import fork_safe_lock
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.segments import Backend, Segment, gpu_support
from shared_rpc.protocol.infos import MechanismInfo
from shared_rpc.protocol.records import EXPORTER_OWNED, Mechanism

MechanismOption = Literal["auto", "vmm", "ipc", "pool"]

#: In order of preference: only memory of the first mechanism outlives its maker and can be mapped read-only; legacy IPC
#: precedes pools, because opening its memory needs nothing from the maker.
PREFERENCE: tuple[Mechanism, ...] = ("vmm", "ipc", "pool")

_GOOD = {
    "vmm": "the GPU has virtual memory management and exports POSIX descriptors",
    "ipc": "the GPU has legacy CUDA IPC",
    "pool": "the GPU has stream-ordered pools that export POSIX descriptors",
}


class Choice(msgspec.Struct, frozen=True):
    """A mechanism and the reason for it."""

    name: Mechanism
    reason: str


_HOST = Choice("memfd", "host memory is a memfd")

_lock = fork_safe_lock()
_chosen: dict[str, Choice] = {}
#: Devices whose mechanism was given by a provider.
_forced: set[str] = set()


def survey(device: str) -> dict[Mechanism, str]:
    """Return the missing feature of the GPU of a device id for each mechanism, ``""`` if the driver reports support.

    :raises CapabilityError: if this process sees no GPU.
    """
    with gpu_support():
        from shared_rpc.memory.backends.cuda import POSIX_FD, attribute, ordinal_of
    has = functools.partial(attribute, ordinal_of(device))
    vmm, vmm_fds = has("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"), has("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    pools, pool_fds = has("MEMORY_POOLS_SUPPORTED"), has("MEMPOOL_SUPPORTED_HANDLE_TYPES") & int(POSIX_FD)
    # Containers and WSL may still refuse legacy IPC when memory is opened.
    ipc = has("UNIFIED_ADDRESSING") and has("IPC_EVENT_SUPPORTED")
    return {
        "vmm": "" if vmm and vmm_fds else _without_fds("virtual memory management", vmm),
        "ipc": "" if ipc else "no legacy CUDA IPC",
        "pool": "" if pools and pool_fds else _without_fds("stream-ordered pools", pools),
    }


def _without_fds(what: str, there: int) -> str:
    return f"{what}, but without export as POSIX descriptors" if there else f"no {what} (vGPU and WSL lack it)"


def _check(asked: str, device: str) -> None:
    if asked not in get_args(MechanismOption):
        raise ConfigurationError(f"mechanism={asked!r}: use 'auto', 'vmm', 'ipc' or 'pool'")
    if device == "cpu" and asked != "auto":
        raise ConfigurationError(
            f"mechanism={asked!r} is for GPU memory, and the device is the host, whose memory is shared as a memfd: leave "
            f"mechanism='auto', or use device='cuda'"
        )


def _find(asked: str, device: str) -> Choice:
    if device == "cpu":
        return _HOST
    lacks = survey(device)
    working = [name for name in PREFERENCE if not lacks[name]]
    if asked == "auto":
        if not working:
            reasons = "; ".join(f"{name}: {lacks[name]}" for name in PREFERENCE)
            raise CapabilityError(f"GPU {device} supports no mechanism to share memory ({reasons}): use device='cpu'")
        name = working[0]
        passed = "; ".join(f"the GPU has {lacks[other]}" for other in PREFERENCE[: PREFERENCE.index(name)])
        return Choice(name, passed or _GOOD[name])
    (name,) = (name for name in PREFERENCE if name == asked)
    if lacks[name]:
        raise CapabilityError(
            f"mechanism={asked!r}, but GPU {device} has {lacks[name]}: use 'auto'"
            + "".join(f" or {other!r}" for other in working)
        )
    return Choice(name, f"chosen by Provider(mechanism={asked!r})")


def chosen(device: str) -> Choice:
    """Return the mechanism with which this process allocates segments on a device.

    :raises CapabilityError: if none is available.
    """
    with _lock:
        if device not in _chosen:
            _chosen[device] = _find("auto", device)
        return _chosen[device]


def choose_mechanism(asked: str, device: str) -> Choice:
    """Apply a provider's option, and return the result of :func:`chosen` from now on.

    :raises ConfigurationError: for an unknown option, one that does not fit the device, or one that contradicts another
        provider of this process.
    :raises CapabilityError: if the GPU lacks the mechanism.
    """
    _check(asked, device)
    if asked == "auto":
        return chosen(device)
    with _lock:
        before = _chosen.get(device)
        if device in _forced and before is not None and before.name != asked:
            raise ConfigurationError(
                f"mechanism={asked!r}, but another provider of this process chose {before.name!r} for {device}: use one "
                f"mechanism for each GPU in a process"
            )
        choice = _chosen[device] = _find(asked, device)
        _forced.add(device)
        return choice


def mechanism_info(asked: str, device: str) -> MechanismInfo:
    """Return how this process shares the memory of a device, or why it cannot.

    :raises ConfigurationError: like :func:`choose_mechanism`.
    :raises CapabilityError: if the GPU lacks the mechanism.
    """
    try:
        choice = choose_mechanism(asked, device)
    except CapabilityError as error:
        if asked != "auto":
            raise
        return {"name": None, "reason": str(error), "mps": False}
    return {"name": choice.name, "reason": choice.reason, "mps": device != "cpu" and mps(device)}


def mps(device: str) -> bool:
    """Return True if this process uses the GPU of a device id through NVIDIA's Multi-Process Service."""
    with gpu_support():
        from shared_rpc.memory.backends.cuda import ordinal_of, under_mps
    return under_mps(ordinal_of(device))


def makers(segments: Iterable[Segment]) -> set[int]:
    """Return the processes whose end frees the memory of an object. The segments are borrowed."""
    from shared_rpc.memory.backends.exporter_owned import export_descriptor_of

    pids = set()
    for segment in segments:
        if segment.info.mechanism in EXPORTER_OWNED and not segment.closed:
            with suppress(CapabilityError):  # it is not an export descriptor, whatever its sender claimed
                pids.add(export_descriptor_of(segment.fileno()).pid)
    return pids


def lifetime(segments: Iterable[Segment]) -> str:
    """Describe the processes whose end frees the memory of an object; ``""`` for none. The segments are borrowed."""
    pids = makers(segments)
    return "bound to the life of pid " + ", pid ".join(map(str, sorted(pids))) if pids else ""


def backend_for(device: str, mechanism: Mechanism | None = None) -> Backend:
    """Return the backend of a device id, ``"cpu"`` or a GPU's UUID.

    :param mechanism: that of an existing segment; None for the one by which this process makes its own.
    :raises CapabilityError: if this process cannot use that device, or not by that mechanism.
    """
    if mechanism is None:
        mechanism = chosen(device).name
    return _backend_for(device, mechanism)


#: The class of a GPU mechanism's backend, in the module imported with its first use.
_BACKENDS: dict[Mechanism, str] = {
    "vmm": "vmm.VmmBackend",
    "host_vmm": "vmm.HostVmmBackend",
    "ipc": "legacy_ipc.IpcBackend",
    "pool": "pool_ipc.PoolBackend",
}


@functools.cache
def _backend_for(device: str, mechanism: Mechanism) -> Backend:
    if mechanism == "file" or (device == "cpu") != (mechanism == "memfd"):
        raise CapabilityError(f"device {device} does not share memory by the mechanism {mechanism!r}")
    if mechanism == "memfd":
        return HOST
    module, _, name = _BACKENDS[mechanism].partition(".")
    with gpu_support(f"memory on {device} shared by the mechanism {mechanism!r}"):
        backend: Backend = getattr(importlib.import_module(f"shared_rpc.memory.backends.{module}"), name)(device)
    return backend
