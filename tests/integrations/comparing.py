"""Placement and contents of a model's memory."""

from __future__ import annotations

import torch
from torch import nn

from shared_rpc.memory.mapping import MAPPINGS


def shared_parameters(module: nn.Module) -> dict[str, int]:
    """Return the addresses, by name, of those parameters whose memory is mapped for reading."""
    found = {}
    for name, parameter in module.named_parameters():
        place = MAPPINGS.find(parameter.data_ptr())
        if place is not None and place[0].info.access == "read":
            found[name] = parameter.data_ptr()
    return found


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have equal tensors by the same names."""
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name].to(left[name].device)) for name in left)
