"""Operations that were written down, with views in the place of tensors, so that they can be done again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Step", "View"]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor, as what it sees of a storage; ``key`` names the storage."""

    key: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """What a tensor sees now."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters of lazy layers refuse to tell
            return cls(
                tensor.untyped_storage()._cdata,
                tensor.dtype,
                int(tensor.storage_offset()),
                tuple(tensor.size()),
                tensor.stride(),
                tensor.is_conj(),
                tensor.is_neg(),
            )

    def over(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """The same view of the storage that was made for the key."""
        storage = storages[self.key]
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.strides)
        tensor = torch._neg_view(tensor) if self.neg else tensor
        return tensor.conj() if self.conj else tensor

    def lay_out(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """A storage that has the tensor's values where this view looks for them."""
        if tensor.stride() == self.strides and tensor.storage_offset() == self.offset:
            return tensor.untyped_storage()
        extent = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1
        placed = torch.empty(extent, dtype=self.dtype, device=tensor.device)
        placed.as_strided(self.shape, self.strides, self.offset).copy_(tensor)
        return placed.untyped_storage()


@dataclass(slots=True)
class Step:
    """One operation that made or wrote storages. Tensors of the block among its arguments are views."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    changes: set[int]
    reads: set[int]
    outputs: list[View] = field(default_factory=list)
    #: Bytes of values that are kept for it.
    kept: int = 0

    def repeat(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Do it with these storages, to which those are added that it makes."""
        args, kwargs = tree_map_only(View, lambda view: view.over(storages), (self.args, self.kwargs))
        made = [leaf for leaf in tree_leaves(self.function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        for view, tensor in zip(self.outputs, made, strict=True):
            if view.key not in storages:
                storages[view.key] = view.lay_out(tensor)
