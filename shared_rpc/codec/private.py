"""Private storages: each process that rebuilds a value has its own, copied from the published ones.

They are memory of torch's own allocator, like that of any other tensor, so the published segment is not kept mapped. Storages
that overlap in their original process are separate here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch

from shared_rpc.codec.storages import copy_bytes, current_stream
from shared_rpc.errors import CapabilityError, CodecError
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import Mapping
from shared_rpc.protocol.records import SegmentInfo, StorageEntry


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


def copied_storages(entries: Sequence[StorageEntry], mappings: Sequence[Mapping]) -> dict[int, torch.UntypedStorage]:
    """Return the storages in private segments, by number: copies, complete on return.

    :raises CapabilityError: if the device has too little memory for them.
    :raises CodecError: if an entry exceeds its segment.
    """
    copies: dict[int, torch.UntypedStorage] = {}
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
    if entry.offset < 0 or entry.nbytes < 0 or entry.offset + entry.nbytes > mapping.info.nbytes:
        raise CodecError(
            f"a storage of {entry.nbytes} bytes at {entry.offset} is not within its segment of {mapping.info.nbytes}"
        )
    try:
        copied = torch.UntypedStorage(entry.nbytes, device=device)
    except RuntimeError as error:
        raise CapabilityError(
            f"cannot allocate {entry.nbytes} bytes on {device} for private tensors of pid {os.getpid()} in {mapping}: {error}"
        ) from error
    copy_bytes(mapping.backend, copied.data_ptr(), mapping.address + entry.offset, entry.nbytes, device)
    return copied
