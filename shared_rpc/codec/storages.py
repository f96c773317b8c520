"""Storages over mapped memory, and copies of bytes."""

from __future__ import annotations

import torch

from shared_rpc.codec.reducers import make_storage
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.memory.segments import Backend

#: Bytes that one thread copies as fast as several.
_SMALL = 1 << 20


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return ``nbytes`` bytes of memory as a uint8 tensor that owns nothing."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def whole_tensor(mapping: Mapping, nbytes: int, offset: int = 0) -> torch.Tensor:
    """Return bytes of a mapping, from an offset on, as a flat uint8 tensor, which keeps the mapping."""
    storage = make_storage(mapping, offset, nbytes, torch_device(mapping.info.device))
    MAPPINGS.keep_for([(mapping, storage)])
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))


def copy_bytes(backend: Backend, target: int, source: int, nbytes: int, device: torch.device) -> None:
    """Copy bytes between two addresses of a device, on its current stream."""
    if device.type == "cuda" or nbytes <= _SMALL:
        backend.copy(target, source, nbytes, current_stream(device))
        return
    with torch.inference_mode(False), torch.no_grad():
        bytes_at(target, nbytes, device).copy_(bytes_at(source, nbytes, device))


def current_stream(device: torch.device) -> int:
    """Return the handle of a device's current stream, 0 for the host."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0
