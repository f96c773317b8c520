"""What is in safetensors files, and where: their headers and indexes, checked against what is there. No tensor is read."""

from __future__ import annotations

import errno
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from shared_rpc.errors import CheckpointError

__all__ = ["StoredTensor", "find"]

#: torch's name of each dtype, and its bytes. Those of less than a byte are left out: torch has no strides for them.
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

#: Bytes of a header, the format's own limit.
_HEADER_LIMIT = 100_000_000
#: Bytes that torch can count.
_LARGEST = (1 << 63) - 1

T = TypeVar("T")


class StoredTensor(NamedTuple):
    """Where a tensor is: ``nbytes`` bytes from ``offset`` on in ``file``, in C order. ``dtype`` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_headers = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entries = msgspec.json.Decoder(_Entry)
_indexes = msgspec.json.Decoder(_Index)


def find(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """All tensors of a checkpoint, file by file in the order they lie there. For ``path`` and errors see :func:`load`."""
    place = Path(path)
    if place.is_dir():
        place = _in_folder(place)
    return _of_index(place) if place.suffix == ".json" else _of_file(place)


def _in_folder(folder: Path) -> Path:
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json: name the file")


def _of_index(path: Path) -> list[StoredTensor]:
    weight_map = _decoded(_indexes, path.read_bytes(), f"{path} is no index of safetensors files").weight_map
    by_file: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        if Path(file).name != file or file in ("", "..") or "\0" in file:
            raise CheckpointError(f"{path}: tensor {name!r} is said to be in {file!r}, which is no file beside the index")
        by_file[file].add(name)
    found = []
    for file, names in by_file.items():
        shard = path.parent / file
        if not shard.exists():
            raise FileNotFoundError(errno.ENOENT, f"{path} says that there is a file beside it, and there is none", str(shard))
        there = [tensor for tensor in _of_file(shard) if tensor.name in names]
        missing = sorted(names - {tensor.name for tensor in there})
        if missing:
            raise CheckpointError(f"{path}: tensor {missing[0]!r} is said to be in {file}, and is not ({len(missing)} missing)")
        found += there
    return found


def _of_file(path: Path) -> list[StoredTensor]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_LIMIT, size - 8):
            raise CheckpointError(
                f"{path} is truncated, or no safetensors file: it has {size} bytes, and its header would have {length}"
            )
        header = file.read(length)
    entries = {
        name: _decoded(_entries, raw, f"{path}: the header's entry of tensor {name!r} cannot be read")
        for name, raw in _decoded(_headers, header, f"{path}: the header cannot be read").items()
        if name != "__metadata__"
    }
    tensors = [_checked(path, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(path, tensors, 8 + length, size)
    return tensors


def _decoded(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw, complaint: str) -> T:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{complaint}: {error}") from error


def _checked(path: Path, name: str, entry: _Entry, start: int) -> StoredTensor:
    if entry.dtype not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has the dtype {entry.dtype}, which torch has no like of")
    dtype, itemsize = _DTYPES[entry.dtype]
    begin, end = entry.data_offsets
    # A tensor without elements may claim sizes whose strides no number holds.
    extent = math.prod(size for size in entry.shape if size) * itemsize
    if (
        extent > _LARGEST
        or min(entry.shape, default=0) < 0
        or not 0 <= begin <= end
        or end - begin != math.prod(entry.shape) * itemsize
    ):
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(entry.shape)} and dtype {entry.dtype} cannot be the bytes {begin} to {end}"
        )
    return StoredTensor(name, dtype, entry.shape, path, start + begin, end - begin)


def _check_cover(path: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    """The tensors lie one after the other, from the header to the file's end."""
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} begins at byte {tensor.offset}, and not at {end}")
        end += tensor.nbytes
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name!r} ends at byte {end}, and the file has {size}: copy it again"
            )
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes, of which its header knows {end}: it is not the file that was written")
