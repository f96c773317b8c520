"""Recurrent layers over shared memory of a GPU: their weights stay in place.

cuDNN requires the weights of such a layer in one contiguous block, and torch moves them into one: in ``flatten_parameters()``,
which is also called by ``.to()``, and by every call with a computed weight (weight_norm). That would silently move weights out
of shared memory, in the server as in a client. Their layout in it is that of the original layer, which is contiguous; cuDNN
copies other ones for each call, with a warning of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shared_rpc.memory.mapping import MAPPINGS


def keep_in_place() -> None:
    """Make ``flatten_parameters()``, which is public and unchanged since torch 0.2, leave mapped parameters in place."""
    before: Callable[[torch.nn.RNNBase], None] = torch.nn.RNNBase.flatten_parameters

    @functools.wraps(before)
    def flatten_parameters(module: torch.nn.RNNBase) -> None:
        if not any(_is_shared(parameter) for parameter in module.parameters()):
            before(module)

    patched: Any = torch.nn.RNNBase
    patched.flatten_parameters = flatten_parameters


def _is_shared(parameter: torch.Tensor) -> bool:
    """Return True if a parameter lies in memory that others map too; the chunks of pools are the reader's own."""
    if not parameter.is_cuda:
        return False
    try:
        found = MAPPINGS.find(parameter.data_ptr())
    except RuntimeError:
        return False  # a tensor without memory, such as fake and functional tensors
    return found is not None and not found[0].pooled
