"""Weights from safetensors files, read once, directly into shared memory.

``load()`` reads a file, or the files of an index, directly into new segments. A module made of these tensors and returned by
an endpoint is published in place: nothing is copied, and the weights are never in memory twice.

The format is 8 bytes with the length of a header, the header in JSON, and the tensors' bytes, so that no other package is
needed (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import errno
import math
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from shared_rpc.context import progress, raise_if_cancelled
from shared_rpc.errors import CheckpointError
from shared_rpc.memory.devices import device_id, torch_device
from shared_rpc.memory.file_parts import Part, PartError, carrier_of, place_in, read_parts
from shared_rpc.memory.layout import pack
from shared_rpc.memory.mapping import MAPPINGS, Mapping

if TYPE_CHECKING:
    import torch

__all__ = ["CheckpointError", "StoredTensor", "find", "load"]

#: torch's name of each dtype, and its bytes. Dtypes of less than a byte are left out: torch has no strides for them.
_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}

#: Maximum bytes of a header, set by the format.
_HEADER_LIMIT = 100_000_000
#: Bytes that a thread reads at a time: few enough for a smooth progress bar.
_PART = 16 << 20

T = TypeVar("T")


class StoredTensor(NamedTuple):
    """The place of a tensor: ``nbytes`` bytes from ``offset`` on in ``file``, in C order. ``dtype`` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    *,
    wanted: Callable[[str], bool] | None = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of a checkpoint, by name, into new memory that this process can share.

    In an endpoint it reports its progress in bytes (:func:`shared_rpc.progress`), and ends early if its task is cancelled. All
    headers are checked before memory is allocated, and all work on the GPU is complete on return.

    ::

        with torch.device("meta"):
            model = Net()
        model.load_state_dict(load("net.safetensors", provider.device_id), assign=True)

    :param path: a ``.safetensors`` file, a ``.safetensors.index.json``, or a folder with ``model.safetensors`` or its index.
    :param device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:<index>"`` or a GPU's UUID; in an endpoint use
        ``provider.device_id``.
    :param wanted: selects tensors by name; by default all.
    :raises FileNotFoundError: if a file does not exist.
    :raises CheckpointError: if a file is damaged, or not of this format. It names the file, and the tensor.
    :raises CapabilityError: if the device has too little memory.
    :raises TaskCancelled: if the task that runs this was cancelled.
    """
    chosen = [tensor for tensor in find(path) if wanted is None or wanted(tensor.name)]
    return _fill(chosen, device_id(device))


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def find(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """List all tensors of a checkpoint, file by file in their order there. For ``path`` and errors see :func:`load`."""
    place = Path(path)
    if place.is_dir():
        there = [place / name for name in ("model.safetensors.index.json", "model.safetensors") if (place / name).exists()]
        if not there:
            raise FileNotFoundError(f"{place} has neither model.safetensors nor model.safetensors.index.json: name the file")
        place = there[0]
    return _of_index(place) if place.suffix == ".json" else _of_file(place)


def _of_index(path: Path) -> list[StoredTensor]:
    weight_map = _decoded(_Index, path.read_bytes(), f"{path} is no index of safetensors files").weight_map
    by_file: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        if Path(file).name != file or file in ("", "..") or "\0" in file:
            raise CheckpointError(f"{path}: tensor {name!r} is listed in {file!r}, which is not in the index's directory")
        by_file[file].add(name)
    found = []
    for file, names in by_file.items():
        shard = path.parent / file
        if not shard.exists():
            raise FileNotFoundError(errno.ENOENT, f"{path} lists a missing file", str(shard))
        there = [tensor for tensor in _of_file(shard) if tensor.name in names]
        missing = sorted(names - {tensor.name for tensor in there})
        if missing:
            raise CheckpointError(
                f"{path}: tensor {missing[0]!r} is listed in {file}, which does not have it ({len(missing)} missing)"
            )
        found += there
    return found


def _of_file(path: Path) -> list[StoredTensor]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_LIMIT, size - 8):
            raise CheckpointError(
                f"{path} is truncated, or no safetensors file: it has {size} bytes, and its header claims {length}"
            )
        header = file.read(length)
    entries = {
        name: _decoded(_Entry, raw, f"{path}: the header's entry of tensor {name!r} cannot be read")
        for name, raw in _decoded(dict[str, msgspec.Raw], header, f"{path}: the header cannot be read").items()
        if name != "__metadata__"
    }
    found = (_checked(path, name, entry, 8 + length) for name, entry in entries.items())
    tensors = sorted(found, key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} begins at byte {tensor.offset}, and not at {end}")
        end += tensor.nbytes
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes, and its header describes {end}: it is truncated or another file")
    return tensors


def _decoded(kind: type[T], text: bytes | msgspec.Raw, complaint: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{complaint}: {error}") from error


def _checked(path: Path, name: str, entry: _Entry, start: int) -> StoredTensor:
    if entry.dtype not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has the dtype {entry.dtype}, which torch lacks")
    dtype, itemsize = _DTYPES[entry.dtype]
    begin, end = entry.data_offsets
    # torch computes strides of empty tensors too, in 64 bits.
    fits = min(entry.shape, default=0) >= 0 and math.prod(max(size, 1) for size in entry.shape) < 1 << 63
    if not fits or not 0 <= begin <= end or end - begin != math.prod(entry.shape) * itemsize:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(entry.shape)} and dtype {entry.dtype} cannot be the bytes {begin} to {end}"
        )
    return StoredTensor(name, dtype, entry.shape, path, start + begin, end - begin)


def _fill(tensors: list[StoredTensor], device: str) -> dict[str, torch.Tensor]:
    sizes, places = pack([tensor.nbytes for tensor in tensors])
    made: dict[str, torch.Tensor] = {}
    parts: dict[Part, StoredTensor] = {}
    with ExitStack() as stack:
        files = {path: stack.enter_context(open(path, "rb")).fileno() for path in {tensor.file for tensor in tensors}}
        # Memory is allocated before the first byte is read, so that a lack of it is an error at once.
        mappings = [stack.enter_context(MAPPINGS.create(max(size, 1), device)) for size in sizes]
        for tensor, place in zip(tensors, places, strict=True):
            mapping = mappings[place.segment]
            made[tensor.name] = _over(mapping, place.offset, tensor)
            for start in range(0, tensor.nbytes, _PART):
                at, nbytes = place_in(mapping, place.offset + start), min(_PART, tensor.nbytes - start)
                parts[Part(files[tensor.file], tensor.offset + start, nbytes, *at)] = tensor
        _read(parts, device)
    return made


def _over(mapping: Mapping, offset: int, stored: StoredTensor) -> torch.Tensor:
    """Make a tensor over mapped memory. Its storage is its own, and keeps the mapping."""
    import torch

    from shared_rpc.codec.reducers import make_storage

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


def _read(parts: dict[Part, StoredTensor], device: str) -> None:
    done, total = 0, sum(part.nbytes for part in parts)

    def count(part: Part) -> None:
        nonlocal done
        raise_if_cancelled()
        done += part.nbytes
        progress(done, total, str(parts[part].file))

    progress(0, total, str(next(iter(parts.values())).file) if parts else "")
    try:
        read_parts(list(parts), carrier_of(device), count)
    except PartError as error:
        tensor, problem = parts[error.part], error.problem
        if problem is None or problem.errno:
            raise problem or error from None
        raise CheckpointError(
            f"{tensor.file} was truncated while it was read: tensor {tensor.name!r} lacks its last bytes: {problem.strerror}"
        ) from None
