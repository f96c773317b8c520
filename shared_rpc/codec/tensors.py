"""Tensors over mapped memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import torch

from shared_rpc.errors import CodecError
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.records import StorageEntry, TensorEntry, TensorTable

__all__ = ["bytes_at", "make_storage", "make_tensor", "read_table", "tensors_of"]

_tables = msgspec.msgpack.Decoder(TensorTable)


def read_table(table: bytes | msgspec.Raw) -> TensorTable:
    """A table as it came.

    :raises CodecError: if it is none.
    """
    try:
        return _tables.decode(table)
    except msgspec.DecodeError as error:
        raise CodecError(f"the tensor table cannot be read: {error}") from error


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """``nbytes`` bytes of memory as a uint8 tensor that owns nothing."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def make_storage(mapping: Mapping, offset: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over mapped bytes. It is to be lent the mapping (:meth:`MappingTable.lend`) before the mapping is let go."""
    return cast("torch.UntypedStorage", torch._C._construct_storage_from_data_pointer(mapping.address + offset, device, nbytes))


def make_tensor(entry: TensorEntry, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor of a table entry."""
    tensor = torch.empty(0, dtype=getattr(torch, entry.dtype), device=storage.device)
    tensor.set_(storage, entry.offset, entry.shape, entry.strides)
    if entry.conj:
        tensor = tensor.conj()
    if entry.neg:
        tensor = torch._neg_view(tensor)
    if entry.parameter:
        return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, entry.requires_grad)
    return tensor.requires_grad_() if entry.requires_grad else tensor


def tensors_of(table: TensorTable, mappings: Sequence[Mapping]) -> tuple[list[torch.Tensor], list[torch.UntypedStorage]]:
    """All tensors and storages of a table, over the segments' mappings.

    A mapping is kept while a storage over it, or any tensor, view or autograd graph of that, lives.

    :raises CodecError: if an entry leaves its segment or its storage, or names a dtype this torch lacks.
    """
    devices = [torch_device(mapping.info.device) for mapping in mappings]
    # Built under inference mode they could not be used outside it.
    with torch.inference_mode(False), torch.no_grad():
        try:
            storages = [_storage(entry, mappings, devices, table) for entry in table.storages]
            MAPPINGS.lend(
                (mappings[entry.segment], storage)
                for entry, storage in zip(table.storages, storages, strict=True)
                if entry.segment >= 0
            )
            return [make_tensor(entry, storages[entry.storage]) for entry in table.tensors], storages
        except (IndexError, AttributeError, TypeError, RuntimeError) as error:
            raise CodecError(f"the tensor table does not fit its memory: {error}") from error


def _storage(
    entry: StorageEntry, mappings: Sequence[Mapping], devices: Sequence[torch.device], table: TensorTable
) -> torch.UntypedStorage:
    if entry.segment < 0:
        return torch.UntypedStorage(0, device=torch_device(table.devices[entry.device]))  # type: ignore[no-untyped-call]
    mapping = mappings[entry.segment]
    if entry.offset < 0 or entry.nbytes < 0 or entry.offset + entry.nbytes > mapping.info.nbytes:
        raise CodecError(f"a storage of {entry.nbytes} bytes at {entry.offset} leaves its segment of {mapping.info.nbytes}")
    return make_storage(mapping, entry.offset, entry.nbytes, devices[entry.segment])
