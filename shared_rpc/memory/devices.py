"""Names of devices: the users', those on the wire, and torch's.

On the wire and in socket paths a device is ``"cpu"`` or the UUID of a GPU, never an index, because
``CUDA_VISIBLE_DEVICES`` may differ between processes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.memory.segments import gpu_support

if TYPE_CHECKING:
    import torch


def device_id(device: str) -> str:
    """Return the id of ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` or ``"GPU-<uuid>"``.

    ``"auto"`` is the current CUDA device where ``torch.cuda.is_available()``, else the host.

    :raises ConfigurationError: for anything else.
    :raises CapabilityError: for a GPU that is not there.
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
    """Raise :class:`ConfigurationError` for a text that cannot name a device, see :func:`device_id`. It looks at no GPU."""
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
    """Return the device of tensors over memory of that device: for a GPU that is not visible here the peer that reaches it."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    with gpu_support():
        from shared_rpc.memory.backends.cuda import ordinal_of
    return torch.device("cuda", ordinal_of(device))
