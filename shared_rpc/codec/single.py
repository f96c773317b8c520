"""One plain tensor, the most frequent value by far, copied into a pool and rebuilt from it in a few microseconds.

What is not so plain goes the general way, which gives the same record: whoever reads it sees no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import torch

from shared_rpc.codec.tensors import make_storage, make_tensor, make_trusted, named, read_table
from shared_rpc.errors import CodecError
from shared_rpc.memory.arena import aligned
from shared_rpc.memory.borrowing import Borrower
from shared_rpc.memory.devices import id_of, torch_device
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import Chunk, Pool
from shared_rpc.memory.segments import Segment
from shared_rpc.records import ONE_TENSOR, StorageEntry, TensorEntry, TensorTable

__all__ = ["FIRST", "Copied", "copy_single", "rebuild_single"]

#: The skeletons of a value that is tensor 0 of its table and nothing else.
FIRST = (b"I0\nQ.", ONE_TENSOR)

_encode = msgspec.msgpack.Encoder().encode


class Copied:
    """A tensor in a chunk of a pool. The copy is queued on the tensor's current stream, see :meth:`wait`.

    ``segment`` is the arena's, with a descriptor of its own that belongs to whoever takes it.
    """

    __slots__ = ("_backend", "_stream", "chunk", "nbytes", "segment", "table")

    def __init__(self, tensor: torch.Tensor, chunk: Chunk, nbytes: int) -> None:
        self.chunk = chunk
        self.nbytes = nbytes
        mapping = chunk.arena.mapping
        assert mapping.segment is not None, "an arena can be sent"
        self._backend = mapping.backend
        device = tensor.device
        self._stream = int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0
        entry = TensorEntry(0, str(tensor.dtype)[6:], 0, tuple(tensor.shape), tensor.stride())
        self.table = _encode(TensorTable((), (StorageEntry(0, chunk.offset, nbytes, 0, chunk.number),), (entry,)))
        self._backend.copy(mapping.address + chunk.offset, tensor.data_ptr(), nbytes, self._stream)
        self.segment = mapping.segment.duplicate()

    def wait(self) -> None:
        """Until the copy is done, and what was queued on its stream before."""
        self._backend.wait(self._stream)

    def give_up(self, pool: Pool) -> None:
        """Nobody will have it."""
        self.segment.close()
        pool.give((self.chunk.number,))

    def wait_briefly(self, seconds: float) -> bool:
        """:meth:`wait` for so many seconds at most; whether it was done in time."""
        return self._backend.wait_briefly(seconds, self._stream)


def copy_single(tensor: torch.Tensor, kind: str, pool: Pool, purpose: str, limit: int | None = None) -> Copied | None:
    """Copy a tensor into a pool; None for one that has to go the general way, errors included.

    :param kind: the type of device that it must be on.
    :param limit: bytes of which there may be at most; None for as many as the pool takes.
    :raises PoolFull: if the pool has no room now.
    """
    nbytes = tensor.nbytes
    if (
        nbytes == 0
        or (limit is not None and nbytes > limit)
        or not pool.options.takes(aligned(nbytes))
        or tensor.device.type != kind
        or tensor.layout is not torch.strided
        or tensor.requires_grad
        or tensor.is_quantized
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
        or named(tensor)
        or tensor.__dict__
        or MAPPINGS.find(tensor.data_ptr()) is not None
        or (kind == "cuda" and torch.cuda.is_current_stream_capturing())
    ):
        return None
    (chunk,) = pool.take(id_of(tensor.device), (nbytes,), purpose)
    try:
        return Copied(tensor, chunk, nbytes)
    except BaseException:
        pool.give((chunk.number,))
        raise


def rebuild_single(
    table: bytes | msgspec.Raw,
    segments: Sequence[Segment],
    loans: dict[int, Borrower],
    arenas: Collection[int],
    owner: str = "",
    *,
    trusted: bool = False,
) -> torch.Tensor | None:
    """The tensor that a table says lies in a chunk of an arena that is mapped already; None where that is not all there is.

    For the parameters see :func:`~shared_rpc.codec.tensors.tensors_of`; the loan is taken from ``loans`` if there is a tensor.

    :param owner: the id of the server that keeps the arena, if one does.

    :raises CodecError: if an entry leaves its segment or its storage, or names a dtype this torch lacks.
    """
    if len(segments) != 1 or len(loans) != 1 or 0 not in arenas:
        return None
    found = read_table(table)
    if len(found.storages) != 1 or len(found.tensors) != 1:
        return None
    place, entry = found.storages[0], found.tensors[0]
    borrower = loans.get(place.chunk)
    hold = borrower.arena(segments[0].info.id) if borrower is not None else None
    if borrower is None or hold is None or place.segment != 0 or entry.storage != 0:
        return None
    mapping = hold.mapping
    if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > mapping.info.nbytes:
        return None
    mapping.owner = owner or mapping.owner
    make: Any = make_trusted if trusted else make_tensor
    # Built under inference mode it could not be used outside it.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        storage = make_storage(mapping, place.offset, place.nbytes, torch_device(mapping.info.device))
        del loans[place.chunk]
        borrower.lend(place.chunk, place.nbytes, mapping, (storage,))
        try:
            tensor: torch.Tensor = make(entry, storage)
        except (AttributeError, TypeError, RuntimeError) as error:
            raise CodecError(f"the tensor table does not fit its memory: {error}") from error
    return tensor
