"""Byte ranges of a value's tensors, and the memory of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shared_rpc.codec.skeleton import Scan, parts_of, wraps
from shared_rpc.protocol.records import TensorEntry

#: Bytes. A multiple of all element sizes: a span that begins at a multiple of it can be counted in elements of any dtype.
_GRAIN = 16


class Span(msgspec.Struct):
    """The bytes of one storage, or those used by its tensors. ``start`` counts from the storage's beginning."""

    storage: int
    address: int
    nbytes: int
    device: torch.device
    start: int = 0


class Block(msgspec.Struct):
    """Bytes that must stay together: one span, or several overlapping ones, such as of two storages over one numpy array."""

    address: int
    nbytes: int
    device: torch.device
    spans: list[Span] = msgspec.field(default_factory=list)


def spans(scan: Scan, *, exact: bool) -> list[Span]:
    """Return a span for every storage, in their order.

    :param exact: leave out unused bytes, so that a row of a large matrix is a row. Not for tensors that are to be moved,
        which keep their place in their storage.
    """
    used: dict[int, list[TensorEntry]] = defaultdict(list)
    if exact:
        for entry in scan.entries:
            if entry.storage not in scan.whole:
                used[entry.storage].append(entry)
    found: list[Span] = []
    for number, storage in enumerate(scan.storages):
        start, end = 0, storage.nbytes()
        if number in used:
            bounds = [_bounds(entry) for entry in used[number]]
            # An empty tensor may begin anywhere, even past the end of its storage.
            start = min(end, *(low for low, _ in bounds)) // _GRAIN * _GRAIN
            end = min(end, max(start, *(high for _, high in bounds)))
        found.append(Span(number, storage.data_ptr() + start, end - start, storage.device, start))
    return found


def _bounds(entry: TensorEntry) -> tuple[int, int]:
    """Return the first byte of its storage used by a tensor, and the one after the last."""
    size = getattr(torch, entry.dtype).itemsize
    if 0 in entry.shape:
        return entry.offset * size, entry.offset * size
    last = sum((count - 1) * stride for count, stride in zip(entry.shape, entry.strides, strict=True))
    return entry.offset * size, (entry.offset + last + 1) * size


def blocks(found: Iterable[Span]) -> list[Block]:
    """Return the blocks of all nonempty spans, in the order of the value, which keeps related memory together."""
    found = [span for span in found if span.nbytes]
    if len(found) == 1:
        return [Block(found[0].address, found[0].nbytes, found[0].device, found)]
    joined: list[Block] = []
    for span in sorted(found, key=lambda span: (str(span.device), span.address, span.nbytes)):
        last = joined[-1] if joined else None
        if last is not None and last.device == span.device and span.address < last.address + last.nbytes:
            last.nbytes = max(last.nbytes, span.address + span.nbytes - last.address)
            last.spans.append(span)
        else:
            joined.append(Block(span.address, span.nbytes, span.device, [span]))
    return sorted(joined, key=lambda block: min(span.storage for span in block.spans))


# If only parameters are shared, the rest of a value is private to each process.


def storages_of_parameters(scan: Scan) -> set[int]:
    """Return the numbers of the storages used by a parameter, anywhere in the value, regardless of other uses."""
    found = {entry.storage for entry in scan.entries if entry.parameter}
    for tensor in scan.odd:
        # torch's own check: it also recognises tensors of other classes that were made parameters.
        if isinstance(tensor, torch.nn.Parameter):
            numbers = (scan.number_of(part.untyped_storage()) for part in strided(tensor))
            found.update(number for number in numbers if number is not None)
    return found


def strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that hold the memory of a tensor, itself if it is strided."""
    if wraps(tensor):
        for inner in _inner(tensor):
            yield from strided(inner)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    else:
        yield from parts_of(tensor)


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in which a wrapper subclass keeps its memory."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
    else:
        parts = tree_leaves(list(vars(tensor).values()))
    return [part for part in parts if isinstance(part, torch.Tensor)]
