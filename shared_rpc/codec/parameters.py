"""The memory of parameters: if only parameters are shared, the rest of a value is private to each process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shared_rpc.codec.skeleton import Scan, parts_of, wraps


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
