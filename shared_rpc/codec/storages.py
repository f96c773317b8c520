"""Copies of bytes, and private storages.

A private storage is copied from the published one by each process that rebuilds the value. It is memory of torch's own
allocator, like that of any other tensor, so the published segment is not kept mapped. Storages that overlap in their original
process are separate here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch

from shared_rpc.codec.reducers import make_storage
from shared_rpc.errors import CapabilityError
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.memory.segments import Backend
from shared_rpc.protocol.records import SegmentInfo, StorageEntry

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


def refuse_capture(infos: Iterable[SegmentInfo]) -> None:
    """Refuse copies on a GPU while the current stream is captured: the copy would be in the graph.

    :raises CapabilityError: in that case, before anything is mapped.
    """
    copies = any(info.access == "private" and info.device != "cpu" for info in infos)
    if copies and torch.cuda.is_current_stream_capturing():
        raise CapabilityError(
            "attaching an object shared with tensors='parameters' copies its private tensors, which cannot be captured into a "
            "CUDA graph: attach the object before the capture"
        )


def private_storages(entries: Sequence[StorageEntry], mappings: Sequence[Mapping]) -> dict[int, torch.UntypedStorage]:
    """Return the storages in private segments, by number: copies, complete on return.

    :raises CapabilityError: if the device has too little memory for them.
    :raises CodecError: if an entry exceeds its segment.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    if not any(mapping.info.access == "private" for mapping in mappings):
        return copies
    sources: dict[Mapping, torch.device] = {}
    for number, entry in enumerate(entries):
        if entry.segment >= 0 and mappings[entry.segment].info.access == "private":
            mapping = mappings[entry.segment]
            device = sources[mapping] = torch_device(mapping.info.device)
            copies[number] = _copy(entry, mapping, device)
    for mapping, device in sources.items():
        mapping.backend.wait(current_stream(device))
    return copies


def _copy(entry: StorageEntry, mapping: Mapping, device: torch.device) -> torch.UntypedStorage:
    source = mapping.address_of(entry.offset, entry.nbytes)
    try:
        copied = torch.UntypedStorage(entry.nbytes, device=device)
    except RuntimeError as error:
        raise CapabilityError(
            f"cannot allocate {entry.nbytes} bytes on {device} for private tensors of pid {os.getpid()} in {mapping}: {error}"
        ) from error
    copy_bytes(mapping.backend, copied.data_ptr(), source, entry.nbytes, device)
    return copied
