"""Reads tensors from files into new segments: on a GPU by way of pinned memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from shared_rpc.context import progress, raise_if_cancelled
from shared_rpc.errors import CheckpointError
from shared_rpc.extras.safetensors.headers import StoredTensor
from shared_rpc.memory.arena import pack
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import MAPPINGS, Mapping

if TYPE_CHECKING:
    import torch

__all__ = ["fill"]

#: Bytes that are read at a time: enough for a disk's and a bus's full speed, few enough for a bar that moves.
_PIECE = 16 << 20


class _Piece(NamedTuple):
    """Bytes of a tensor, and where they go."""

    tensor: StoredTensor
    file: int
    offset: int
    address: int
    nbytes: int


def fill(tensors: list[StoredTensor], device: str, readers: int) -> dict[str, torch.Tensor]:
    """See :func:`shared_rpc.extras.safetensors.load`.

    :param device: the id of a device.
    """
    sizes, places = pack([tensor.nbytes for tensor in tensors])
    made: dict[str, torch.Tensor] = {}
    pieces: list[_Piece] = []
    with ExitStack() as stack:
        files = {path: stack.enter_context(open(path, "rb")).fileno() for path in {tensor.file for tensor in tensors}}
        # Memory is there before the first byte is read, or it is known at once that there is none.
        mappings = [stack.enter_context(MAPPINGS.create(max(size, 1), device)) for size in sizes]
        for tensor, place in zip(tensors, places, strict=True):
            mapping = mappings[place.segment]
            made[tensor.name] = _over(mapping, place.offset, tensor)
            pieces += _pieces(tensor, files[tensor.file], mapping.address + place.offset)
        _read_all(pieces, device, readers)
    return made


def _over(mapping: Mapping, offset: int, stored: StoredTensor) -> torch.Tensor:
    """A tensor over mapped memory, with a storage of its own, that keeps the mapping."""
    import torch

    from shared_rpc.codec.storages import make_storage

    device, dtype = torch_device(mapping.info.device), getattr(torch, stored.dtype, None)
    if dtype is None:
        raise CheckpointError(f"{stored.file}: tensor {stored.name!r} is {stored.dtype}, which torch {torch.__version__} lacks")
    # Built under inference mode it could not be used outside it.
    with torch.inference_mode(False):
        tensor = torch.empty(0, dtype=dtype, device=device)
        if stored.nbytes == 0:
            return tensor.reshape(stored.shape)
        storage = make_storage(mapping, offset, stored.nbytes, device)
        MAPPINGS.keep_for([(mapping, storage)])
        return tensor.set_(storage, 0, stored.shape, torch.empty(stored.shape, device="meta").stride())


def _pieces(tensor: StoredTensor, file: int, address: int) -> Iterable[_Piece]:
    for start in range(0, tensor.nbytes, _PIECE):
        yield _Piece(tensor, file, tensor.offset + start, address + start, min(_PIECE, tensor.nbytes - start))


def _read_all(pieces: list[_Piece], device: str, readers: int) -> None:
    done, total = 0, sum(piece.nbytes for piece in pieces)
    read = _read_to_host if device == "cpu" else _Stage(device).read
    progress(0, total, str(pieces[0].tensor.file) if pieces else "")
    with ThreadPoolExecutor(readers, "shared-rpc-reader") as pool:
        for piece in _carry_out(pool, read, pieces, ahead=2 * readers):
            raise_if_cancelled()
            done += piece.nbytes
            progress(done, total, str(piece.tensor.file))


def _carry_out(
    pool: ThreadPoolExecutor, read: Callable[[_Piece], None], pieces: Iterable[_Piece], ahead: int
) -> Iterator[_Piece]:
    """The pieces, in order, as they are read. Never more than a few are handed over: a process that ends waits for those."""
    pending: deque[tuple[_Piece, Future[None]]] = deque()
    try:
        for piece in pieces:
            pending.append((piece, pool.submit(read, piece)))
            if len(pending) == ahead:
                first, future = pending.popleft()
                future.result()
                yield first
        for first, future in pending:
            future.result()
            yield first
    finally:
        for _, future in pending:
            future.cancel()


def _read_to_host(piece: _Piece, address: int | None = None) -> None:
    view = HOST.view(piece.address if address is None else address, piece.nbytes)
    done = 0
    while done < piece.nbytes:
        count = os.preadv(piece.file, [view[done:]], piece.offset + done)
        if count == 0:
            raise CheckpointError(
                f"{piece.tensor.file} was cut off while it was read: tensor {piece.tensor.name!r} lacks its bytes from "
                f"{piece.offset + done} on"
            )
        done += count


class _Stage:
    """Pinned memory and a stream of its own for each thread that reads, so that one reads while another one copies."""

    def __init__(self, device: str) -> None:
        self._device = torch_device(device)
        self._of_thread = threading.local()

    def read(self, piece: _Piece) -> None:
        """Read a piece, and copy it to the GPU: the copy is complete when this returns."""
        import torch

        from shared_rpc.codec.storages import bytes_at

        with torch.cuda.device(self._device):
            if not hasattr(self._of_thread, "pinned"):
                self._of_thread.pinned = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
                self._of_thread.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            pinned, stream = self._of_thread.pinned, self._of_thread.stream
            _read_to_host(piece, pinned.data_ptr())
            with torch.cuda.stream(stream):
                target = bytes_at(piece.address, piece.nbytes, self._device)
                target.copy_(pinned[: piece.nbytes], non_blocking=True)
            stream.synchronize()
