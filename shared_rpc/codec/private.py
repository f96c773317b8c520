"""Private storages: each process that rebuilds a value has its own, copied from the published ones.

They are memory of torch's own allocator, like that of any other tensor, so the published segment is not kept mapped.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from shared_rpc.codec.storages import copy_bytes, current_stream, view_storage
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

    Storages that overlapped in their original process are over one copy.

    :raises CapabilityError: if the device has too little memory for them.
    :raises CodecError: if an entry exceeds its segment.
    """
    by_segment: dict[int, list[tuple[int, StorageEntry]]] = defaultdict(list)
    for number, entry in enumerate(entries):
        if entry.segment >= 0 and mappings[entry.segment].info.access == "private":
            by_segment[entry.segment].append((number, entry))
    copies: dict[int, torch.UntypedStorage] = {}
    for segment, found in by_segment.items():
        mapping = mappings[segment]
        device = torch_device(mapping.info.device)
        for group in _overlapping(found):
            copies.update(_copies(group, mapping, device))
        mapping.backend.wait(current_stream(device))
    return copies


def _overlapping(found: Iterable[tuple[int, StorageEntry]]) -> Iterator[list[tuple[int, StorageEntry]]]:
    """Yield the overlapping entries of one segment, together."""
    group: list[tuple[int, StorageEntry]] = []
    end = 0
    for number, entry in sorted(found, key=lambda item: item[1].offset):
        if group and entry.offset >= end:
            yield group
            group = []
        end = max(end, entry.offset + entry.nbytes) if group else entry.offset + entry.nbytes
        group.append((number, entry))
    if group:
        yield group


def _copies(
    group: list[tuple[int, StorageEntry]], mapping: Mapping, device: torch.device
) -> Iterator[tuple[int, torch.UntypedStorage]]:
    start = group[0][1].offset
    nbytes = max(entry.offset + entry.nbytes for _, entry in group) - start
    if start < 0 or min(entry.nbytes for _, entry in group) < 0 or start + nbytes > mapping.info.nbytes:
        raise CodecError(f"a storage of {nbytes} bytes at {start} is not within its segment of {mapping.info.nbytes}")
    try:
        whole = torch.UntypedStorage(nbytes, device=device)
    except RuntimeError as error:
        raise CapabilityError(
            f"cannot allocate {nbytes} bytes on {device} for private tensors of pid {os.getpid()} in {mapping}: {error}"
        ) from error
    copy_bytes(mapping.backend, whole.data_ptr(), mapping.address + start, nbytes, device)
    for number, entry in group:
        yield number, whole if len(group) == 1 else view_storage(whole, entry.offset - start, entry.nbytes)
