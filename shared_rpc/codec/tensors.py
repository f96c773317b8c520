"""Tensors over mapped memory."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from shared_rpc.codec.reducers import make_storage
from shared_rpc.codec.storages import private_storages
from shared_rpc.errors import CodecError
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.protocol.records import StorageEntry, TensorEntry, TensorTable

_tables = msgspec.msgpack.Decoder(TensorTable)


#: Named tensors were an experiment, which newer releases of torch remove; reading a missing attribute takes long.
NAMES = hasattr(torch.Tensor, "names")
#: Reads them; the attribute is not in every release.
names_of = operator.attrgetter("names")


def named(tensor: torch.Tensor) -> bool:
    """Return True if the dimensions of a tensor have names, which a table cannot represent."""
    return NAMES and any(names_of(tensor))


def read_table(table: bytes | msgspec.Raw) -> TensorTable:
    """Decode a table.

    :raises CodecError: if it is invalid.
    """
    try:
        return _tables.decode(table)
    except msgspec.DecodeError as error:
        raise CodecError(f"cannot decode the tensor table: {error}") from error


def make_tensor(entry: TensorEntry, storage: torch.UntypedStorage) -> torch.Tensor:
    """Make the tensor of an untrusted table entry: torch refuses one that exceeds the storage."""
    tensor = torch.empty(0, dtype=getattr(torch, entry.dtype), device=storage.device)
    tensor.set_(storage, entry.offset, entry.shape, entry.strides)
    odd = entry.requires_grad or entry.conj or entry.neg or entry.parameter
    return _finished(entry, tensor) if odd else tensor


#: One call in place of two, without their checks: 2 µs a tensor less on an H100's host. In CUDA builds of torch only.
_construct: Any = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)


def make_trusted(entry: TensorEntry, storage: torch.UntypedStorage) -> torch.Tensor:
    """Make the tensor of an entry that fits its storage."""
    device = storage.device
    if _construct is None or device.type != "cuda":
        return make_tensor(entry, storage)
    metadata = {
        "size": entry.shape,
        "stride": entry.strides,
        "dtype": getattr(torch, entry.dtype),
        "device": device,
        "storage_offset": entry.offset,
    }
    return _finished(entry, _construct(metadata, storage))


def _finished(entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
    if entry.conj:
        tensor = tensor.conj()
    if entry.neg:
        tensor = torch._neg_view(tensor)
    if entry.parameter:
        return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, entry.requires_grad)
    return tensor.requires_grad_() if entry.requires_grad else tensor


def tensors_of(
    table: TensorTable,
    mappings: Sequence[Mapping],
    pooled: dict[int, ChunkReferences],
    *,
    trusted: bool = False,
    object_id: str = "",
) -> tuple[list[torch.Tensor], list[torch.UntypedStorage]]:
    """Make all tensors and storages of a table, over the segments' mappings.

    A mapping, or the pool chunk named by a storage, is kept while a storage over it, or any tensor, view or autograd graph of
    that, lives. Private segments are copied, and their mappings are not kept.

    :param pooled: the chunks that came with the table, and their owners; emptied, also if this raises.
    :param trusted: True if the tensors fit their storages; never for a client's table.
    :param object_id: see :meth:`MappingTable.keep_for`.
    :raises CodecError: if an entry exceeds its segment or its storage, or names a dtype that this torch lacks.
    :raises CapabilityError: if there is too little memory for copies.
    """
    devices = {info.device: torch_device(info.device) for info in (mapping.info for mapping in mappings)}
    make = make_trusted if trusted else make_tensor
    try:
        copies = private_storages(table.storages, mappings)
        storages = [
            copies[number] if number in copies else _storage(entry, mappings, devices, table)
            for number, entry in enumerate(table.storages)
        ]
        placed = [
            (entry, storage)
            for number, (entry, storage) in enumerate(zip(table.storages, storages, strict=True))
            if entry.segment >= 0 and number not in copies
        ]
        own = ((mappings[entry.segment], storage) for entry, storage in placed if entry.chunk not in pooled)
        MAPPINGS.keep_for(own, object_id)
        _keep_chunks([(entry, storage) for entry, storage in placed if entry.chunk in pooled], mappings, pooled)
        return [make(entry, storages[entry.storage]) for entry in table.tensors], storages
    except (IndexError, AttributeError, TypeError, RuntimeError) as error:
        raise CodecError(f"the tensor table does not fit its memory: {error}") from error
    finally:
        while pooled:
            chunk, references = pooled.popitem()
            references.release([chunk])


def _keep_chunks(
    placed: list[tuple[StorageEntry, torch.UntypedStorage]], mappings: Sequence[Mapping], pooled: dict[int, ChunkReferences]
) -> None:
    """Attach chunks to the storages that keep them, and remove these from ``pooled``."""
    sharing: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
    for entry, storage in placed:
        sharing[entry.chunk].append(storage)
    for entry, storage in placed:
        references = pooled.pop(entry.chunk, None)
        if references is not None:
            references.acquire(entry.chunk, storage.nbytes(), mappings[entry.segment], sharing[entry.chunk])


def _storage(
    entry: StorageEntry, mappings: Sequence[Mapping], devices: dict[str, torch.device], table: TensorTable
) -> torch.UntypedStorage:
    if entry.segment < 0:
        return torch.UntypedStorage(0, device=torch_device(table.devices[entry.device]))
    mapping = mappings[entry.segment]
    return make_storage(mapping, entry.offset, entry.nbytes, devices[mapping.info.device])
