"""A fast path for the most frequent value: one plain tensor is copied into a pool, and rebuilt, in a few microseconds.

Other values take the general path. Both paths produce the same record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from shared_rpc.codec.reducers import make_storage
from shared_rpc.codec.storages import current_stream
from shared_rpc.codec.tensors import NAMES, make_tensor, make_trusted, names_of, read_table
from shared_rpc.errors import CodecError
from shared_rpc.memory.chunk_references import ChunkReferences
from shared_rpc.memory.devices import id_of, torch_device
from shared_rpc.memory.layout import ALIGNMENT
from shared_rpc.memory.mapping import MAPPINGS, Mapping
from shared_rpc.memory.pool import Chunk, Pool
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Backend, Segment
from shared_rpc.protocol.records import ONE_TENSOR, StorageEntry, TensorEntry, TensorTable

_encode = msgspec.msgpack.Encoder().encode


class Copied(msgspec.Struct):
    """A tensor being copied into a chunk of a pool. The copy is queued on ``stream``; ``backend`` can wait for it.

    ``source`` is kept, because its memory is read until the copy completes. ``segment`` is the arena's segment with a duplicate
    descriptor, which the caller owns.
    """

    source: torch.Tensor
    pool: Pool
    chunk: Chunk
    nbytes: int
    table: bytes
    segment: Segment
    backend: Backend
    stream: int

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the copy and all earlier work on its stream; release the chunk on failure.

        :param seconds: the timeout; None for no limit.
        :returns: True if the copy completed in time.
        """
        try:
            return self.backend.wait(self.stream, seconds)
        except BaseException:
            self.segment.close()
            self.pool.release((self.chunk.number,))
            raise

    def record(self) -> Record:
        """Return the record of the completed copy."""
        segments, device, chunks = (self.segment,), self.segment.info.device, (self.chunk.number,)
        return Record(ONE_TENSOR, self.table, segments, self.nbytes, device, chunks)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if shape, strides, dtype and storage describe a tensor completely."""
    return not (
        tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or (NAMES and any(names_of(tensor)))
        or tensor.__dict__
    )


_capturing = torch.cuda.is_current_stream_capturing


def copy_single(tensor: torch.Tensor, kind: str, pool: Pool, limit: int | None = None) -> Copied | None:
    """Copy a tensor into a pool; return None if the general path must handle it, as with errors and full pools.

    :param kind: the type of device that the tensor must be on.
    :param limit: the maximum number of bytes to copy; None for the pool's own limit.
    """
    if not is_plain(tensor):  # a sparse one has no number of bytes
        return None
    nbytes, device = tensor.nbytes, tensor.device
    size = -(-nbytes // ALIGNMENT) * ALIGNMENT
    if (
        nbytes == 0
        or (limit is not None and nbytes > limit)
        or device.type != kind
        or not tensor.is_contiguous()
        or (kind == "cuda" and _capturing())
    ):
        return None
    address = tensor.data_ptr()
    found = MAPPINGS.find(address)
    if found is not None and not found[0].pooled:
        return None  # the reader can map the memory in place: see Placement.stays()
    chunk = pool.acquire_one(id_of(device), size)
    if chunk is None:
        return None
    try:
        mapping = chunk.arena.mapping
        assert mapping.descriptor is not None, "an arena can be sent"
        stream = 0 if kind == "cpu" else current_stream(device)
        entry = TensorEntry(0, str(tensor.dtype)[6:], 0, tuple(tensor.shape), tensor.stride())
        table = _encode(TensorTable((), (StorageEntry(0, chunk.offset, nbytes, 0, chunk.number),), (entry,)))
        mapping.backend.copy(mapping.address + chunk.offset, address, nbytes, stream)
        return Copied(tensor, pool, chunk, nbytes, table, mapping.descriptor.duplicate(), mapping.backend, stream)
    except BaseException:
        pool.release((chunk.number,))
        raise


def rebuild_single(
    table: bytes | msgspec.Raw,
    segments: Sequence[Segment],
    pooled: dict[int, ChunkReferences],
    owner: str = "",
    *,
    trusted: bool = False,
    label: str = "",
    object_id: str = "",
) -> torch.Tensor | None:
    """Rebuild a single tensor in a mapped arena or slab; return None for any other result.

    For the parameters see :func:`~shared_rpc.codec.tensors.tensors_of`; the entry of ``pooled`` is removed if a tensor is
    returned.

    :param owner: the id of the server that keeps the memory, if one does.
    :param label: the description of a slab, see :meth:`MappingTable.attach`.
    :raises CodecError: if an entry leaves its segment or its storage, or names a dtype this torch lacks.
    """
    if len(segments) != 1 or len(pooled) > 1:
        return None
    found = read_table(table)
    if len(found.storages) != 1 or len(found.tensors) != 1:
        return None
    place, entry = found.storages[0], found.tensors[0]
    info = segments[0].info
    if place.segment != 0 or entry.storage != 0:
        return None
    device = torch_device(info.device)

    def storage_over(mapping: Mapping) -> torch.UntypedStorage:
        return make_storage(mapping, place.offset, place.nbytes, device)

    if pooled:
        references = pooled.get(place.chunk)
        hold = references.holds.get(info.id) if references is not None else None
        if references is None or hold is None:
            return None
        storage = storage_over(hold.mapping)
        del pooled[place.chunk]
        references.acquire(place.chunk, place.nbytes, hold.mapping, (storage,))
    else:
        made = MAPPINGS.make_in_slab(info, storage_over, object_id, owner, label)
        if made is None:
            return None
        storage = made
    make: Any = make_trusted if trusted and device.type == "cuda" else make_tensor
    try:
        tensor: torch.Tensor = make(entry, storage)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise CodecError(f"the tensor table does not fit its memory: {error}") from error
    return tensor
