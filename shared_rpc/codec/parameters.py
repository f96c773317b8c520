"""Parameters of a class of their own in a skeleton, such as those of 8-bit and 4-bit layers.

torch's own reduction makes plain parameters of them, whatever their class, and takes what the class has for ``copy.deepcopy``.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch

__all__ = ["reduce_parameter"]


def reduce_parameter(parameter: torch.nn.Parameter) -> Any:
    """Return the reduction of a parameter that is memory and attributes; NotImplemented for what its class says."""
    kind = type(parameter)
    if kind is torch.nn.Parameter or kind.__reduce_ex__ is not torch.nn.Parameter.__reduce_ex__:
        return NotImplemented
    slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    state = {**parameter.__dict__, **{name: getattr(parameter, name) for name in slots if hasattr(parameter, name)}}
    return _make_parameter, (kind, parameter.data, parameter.requires_grad), state, None, None, _restore


def _make_parameter(kind: type[torch.nn.Parameter], data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def _restore(parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
    for name, value in state.items():
        # Not setattr(), which a class may have its own of.
        object.__setattr__(parameter, name, value)
