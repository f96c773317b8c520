"""One plain tensor, the most frequent value by far, copied into a pool and rebuilt from it in a few microseconds.

What is not so plain goes the general way, which gives the same record: its reader sees no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import torch

from shared_rpc.codec.modes import without_modes
from shared_rpc.codec.storages import current_stream, make_storage
from shared_rpc.codec.tensors import make_tensor, make_trusted, named, read_table
from shared_rpc.errors import CodecError
from shared_rpc.memory.arena import aligned
from shared_rpc.memory.chunk_references import ChunkReferences, keep
from shared_rpc.memory.devices import id_of, torch_device
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Chunk, Pool
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import ONE_TENSOR, StorageEntry, TensorEntry, TensorTable

__all__ = ["FIRST", "Copied", "copy_single", "detach_argument", "rebuild_argument", "rebuild_single"]

#: The skeletons of a value that is tensor 0 of its table and nothing else.
FIRST = (b"I0\nQ.", ONE_TENSOR)

_encode = msgspec.msgpack.Encoder().encode


class Copied:
    """A tensor in a chunk of a pool. The copy is queued on the tensor's current stream, see :meth:`wait`.

    ``segment`` is the arena's, with a descriptor of its own that belongs to the object's user.
    """

    __slots__ = ("_backend", "_pool", "_stream", "chunk", "nbytes", "segment", "table")

    def __init__(self, tensor: torch.Tensor, pool: Pool, chunk: Chunk, nbytes: int) -> None:
        self._pool = pool
        self.chunk = chunk
        self.nbytes = nbytes
        mapping = chunk.arena.mapping
        assert mapping.segment is not None, "an arena can be sent"
        self._backend = mapping.backend
        self._stream = current_stream(tensor.device)
        entry = TensorEntry(0, str(tensor.dtype)[6:], 0, tuple(tensor.shape), tensor.stride())
        self.table = _encode(TensorTable((), (StorageEntry(0, chunk.offset, nbytes, 0, chunk.number),), (entry,)))
        self._backend.copy(mapping.address + chunk.offset, tensor.data_ptr(), nbytes, self._stream)
        self.segment = mapping.segment.duplicate()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the copy is done, and what was queued on its stream before; give the chunk back if that fails.

        :param seconds: to wait at most; None for no limit.
        :returns: whether it was done in time.
        """
        try:
            return self._backend.wait(self._stream, seconds)
        except BaseException:
            self.segment.close()
            self._pool.release((self.chunk.number,))
            raise


def _plain(tensor: torch.Tensor) -> bool:
    return not (
        tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or named(tensor)
        or tensor.__dict__
    )


def _is_known(tensor: torch.Tensor, reader: str) -> bool:
    """Return whether the reader may be told where a tensor lies: see :meth:`Placement.stays`."""
    found = MAPPINGS.find(tensor.data_ptr())
    return found is not None and not (found[0].pooled and (not reader or found[0].owner != reader))


_capturing = torch.cuda.is_current_stream_capturing


def copy_single(
    tensor: torch.Tensor, kind: str, pool: Pool, purpose: str, reader: str = "", limit: int | None = None
) -> Copied | None:
    """Copy a tensor into a pool; return None for one that has to go the general way, errors included.

    :param kind: the type of device that it must be on.
    :param reader: the id of the server that is to read it, ``""`` for anybody.
    :param limit: bytes of which there may be at most; None for as many as the pool takes.
    :raises PoolFull: if the pool has no room now.
    """
    nbytes = tensor.nbytes
    if (
        nbytes == 0
        or (limit is not None and nbytes > limit)
        or not pool.options.takes(aligned(nbytes))
        or tensor.device.type != kind
        or not _plain(tensor)
        or not tensor.is_contiguous()
        or _is_known(tensor, reader)
        or (kind == "cuda" and _capturing())
    ):
        return None
    (chunk,) = pool.acquire(id_of(tensor.device), (nbytes,), purpose)
    try:
        return Copied(tensor, pool, chunk, nbytes)
    except BaseException:
        pool.release((chunk.number,))
        raise


def detach_argument(
    value: list[Any], references: ChunkReferences, seconds: float | None = None
) -> tuple[bytes, int, int, str] | None:
    """Take apart a tensor that fills a chunk of its reader's own, and that nobody else has: it needs no copy.

    None where somebody else in this process has a tensor over the chunk, and could write to what the reader takes for a value.

    :param value: the tensor, which is not there any more where this returns something, and may be another one where not.
    :param seconds: how long to wait for the tensor's current stream, None for as long as it takes.
    :returns: the table, with the offset in the reader's arena; the chunk's number; the tensor's bytes and its device's id.
    """
    tensor = value[0]
    if type(tensor) is not torch.Tensor or not _plain(tensor):
        return None
    storage = tensor.untyped_storage()
    reference = references.reference_of(storage)
    # It stays mapped whatever becomes of the session.
    hold = references.arena(reference.mapping.info.id) if reference is not None else None
    nbytes, device = tensor.nbytes, tensor.device
    if reference is None or hold is None or nbytes != storage.nbytes() or (device.type == "cuda" and _capturing()):
        return None
    stream, offset = current_stream(device), storage.data_ptr() - hold.mapping.address
    if not 0 <= offset <= hold.mapping.info.nbytes - nbytes:
        return None  # torch has moved the storage meanwhile, into shared memory of its own
    if not reference.backend.wait(stream, seconds):
        return None
    entry = TensorEntry(0, str(tensor.dtype)[6:], int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
    # What keeps the chunk goes with its last user: if this is not the last, there is something left.
    del tensor, storage
    value.clear()
    pin = reference()
    if pin is None:
        table = TensorTable((), (StorageEntry(0, offset, nbytes, 0, reference.number),), (entry,))
        return _encode(table), reference.number, nbytes, hold.mapping.info.device
    storage = make_storage(hold.mapping, offset, nbytes, device)
    keep(storage, pin)
    value.append(make_tensor(entry, storage))
    return None


@without_modes
def rebuild_argument(skeleton: bytes, table: bytes | msgspec.Raw, chunk: Chunk, references: ChunkReferences) -> torch.Tensor:
    """Rebuild the tensor that :func:`detach_argument` took apart on the other side. It keeps its chunk in use.

    :param references: to whom the chunk is given back.
    :raises CodecError: if the table says anything else.
    """
    found = read_table(table)
    fits = skeleton in FIRST and len(found.storages) == len(found.tensors) == 1
    place = found.storages[0] if fits else None
    end = chunk.offset + chunk.nbytes
    if place is None or place.nbytes < 0 or not chunk.offset <= place.offset <= end - place.nbytes:
        references.release((chunk.number,))
        raise CodecError("the server answered with an argument's memory, and a table that does not fit it")
    mapping = chunk.arena.mapping
    device = torch_device(mapping.info.device)
    storage = make_storage(mapping, place.offset, place.nbytes, device)
    references.acquire(chunk.number, chunk.nbytes, mapping, (storage,))
    try:
        return make_tensor(found.tensors[0], storage)
    except (AttributeError, TypeError, RuntimeError, IndexError) as error:
        raise CodecError(f"the tensor table does not fit its memory: {error}") from error


def rebuild_single(
    table: bytes | msgspec.Raw,
    segments: Sequence[Segment],
    pooled: dict[int, ChunkReferences],
    arenas: Collection[int],
    owner: str = "",
    *,
    trusted: bool = False,
) -> torch.Tensor | None:
    """Rebuild the tensor in a chunk of an arena that is mapped already; return None where a table says anything else.

    For the parameters see :func:`~shared_rpc.codec.tensors.tensors_of`; the entry of ``pooled`` is taken if there is a tensor.

    :param owner: the id of the server that keeps the arena, if one does.

    :raises CodecError: if an entry leaves its segment or its storage, or names a dtype this torch lacks.
    """
    if len(segments) != 1 or len(pooled) != 1 or 0 not in arenas:
        return None
    found = read_table(table)
    if len(found.storages) != 1 or len(found.tensors) != 1:
        return None
    place, entry = found.storages[0], found.tensors[0]
    references = pooled.get(place.chunk)
    hold = references.arena(segments[0].info.id) if references is not None else None
    if references is None or hold is None or place.segment != 0 or entry.storage != 0:
        return None
    mapping = hold.mapping
    if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > mapping.info.nbytes:
        return None
    mapping.owner = owner or mapping.owner
    make: Any = make_trusted if trusted else make_tensor
    storage = make_storage(mapping, place.offset, place.nbytes, torch_device(mapping.info.device))
    del pooled[place.chunk]
    references.acquire(place.chunk, place.nbytes, mapping, (storage,))
    try:
        tensor: torch.Tensor = make(entry, storage)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise CodecError(f"the tensor table does not fit its memory: {error}") from error
    return tensor
