"""Recurrent layers over shared memory of a GPU: their weights stay where they are.

cuDNN wants the weights of such a layer in one piece, and torch moves them into one: in ``flatten_parameters()``, which is also
what comes of ``.to()``, and of every call where a weight is computed of others (weight_norm). Weights in shared memory would be
taken out of it without a word, in the server as in a client. They lie in it as they lay where the layer was made, which is in
one piece; of those that do not, cuDNN makes a copy for each call, and torch warns of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shared_rpc.memory.mapping import MAPPINGS


def keep_in_place() -> None:
    """Have ``flatten_parameters()``, which is public and the same since torch 0.2, leave what lies in mappings."""
    before: Callable[[torch.nn.RNNBase], None] = torch.nn.RNNBase.flatten_parameters

    @functools.wraps(before)
    def flatten_parameters(module: torch.nn.RNNBase) -> None:
        if not any(_is_shared(parameter) for parameter in module.parameters()):
            before(module)

    patched: Any = torch.nn.RNNBase
    patched.flatten_parameters = flatten_parameters


def _is_shared(parameter: torch.Tensor) -> bool:
    """Return whether a parameter lies in memory that others map too; the chunks of pools are the reader's own."""
    if not parameter.is_cuda:
        return False
    try:
        found = MAPPINGS.find(parameter.data_ptr())
    except RuntimeError:
        return False  # a tensor without memory, as fake and functional tensors
    return found is not None and not found[0].pooled
