"""What has taken the place of the tensors that modules had in the block, for whatever else saw their memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from shared_rpc.building.steps import View
from shared_rpc.errors import CapabilityError

__all__ = ["Successors", "as_it_was"]


@dataclass(frozen=True, slots=True)
class _Successor:
    name: str
    old: View
    new: torch.Tensor
    shared: bool


class Successors:
    """By the memory that there was: a list of weights, or a view of one in an attribute, must see the new memory too."""

    def __init__(self) -> None:
        self._of_storage: defaultdict[int, list[_Successor]] = defaultdict(list)

    def put(self, name: str, old: torch.Tensor, new: torch.Tensor, *, shared: bool) -> None:
        """``new`` is where ``old`` was.

        :param shared: whether it is the source's. Otherwise it has been computed, and what sees more may be computed as well.
        """
        view = View.of(old)
        self._of_storage[view.key].append(_Successor(name, view, new, shared))

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor of the block has become; None if it saw nothing that was put somewhere.

        :raises CapabilityError: if the source's memory cannot be seen so.
        """
        view = View.of(tensor)
        for successor in self._of_storage.get(view.key, ()):
            old, new = successor.old, successor.new
            if view == old:
                return new if isinstance(tensor, nn.Parameter) or not isinstance(new, nn.Parameter) else _base(tensor, new)
            if _within(view, old) and _strides(new) == _strides(old) and (view.dtype, view.conj, view.neg) == (
                old.dtype,
                old.conj,
                old.neg,
            ):  # fmt: skip
                seen = _base(tensor, new).as_strided(view.shape, view.strides, new.storage_offset() + view.offset - old.offset)
                return as_it_was(seen, tensor) if tensor.is_leaf else seen
            if successor.shared and _overlap(view, old):
                raise CapabilityError(
                    f"materialize(): the model keeps a tensor of shape {view.shape} in a plain attribute that sees the memory "
                    f"of {successor.name}, and what the source has there cannot be seen so: have the model make it from the "
                    f"weight when it needs it, or clone it"
                )
        return None


def as_it_was(tensor: torch.Tensor, former: torch.Tensor) -> torch.Tensor:
    """The tensor as a parameter, or as a leaf that gets gradients, if the former one was."""
    if isinstance(former, nn.Parameter):
        parameter = nn.Parameter(tensor, former.requires_grad)
        vars(parameter).update(vars(former))  # marks that optimizers and libraries look for
        return parameter
    return tensor.requires_grad_(former.requires_grad and former.is_leaf)


def _base(former: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What a view is made of: gradients flow through it if they did."""
    return new if former.requires_grad and not former.is_leaf else new.detach()


def _span(view: View) -> tuple[int, int]:
    """The elements from the first to after the last one, counted from the storage's begin."""
    if 0 in view.shape:
        return view.offset, view.offset
    extent = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + 1
    return view.offset, view.offset + extent


def _within(view: View, other: View) -> bool:
    (begin, end), (first, last) = _span(view), _span(other)
    return first <= begin and end <= last


def _overlap(view: View, other: View) -> bool:
    (begin, end), (first, last) = _span(view), _span(other)
    return begin < last and first < end


def _strides(tensor: View | torch.Tensor) -> list[int]:
    """Those that matter."""
    strides = tensor.strides if isinstance(tensor, View) else tensor.stride()
    return [stride for size, stride in zip(tensor.shape, strides, strict=True) if size > 1]
