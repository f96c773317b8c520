"""Modes of a process in which people attach models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def settle(device: str) -> None:
    """Have this process compute as every other one of these tests does, bit for bit."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.backends.cudnn.deterministic = True


@contextlib.contextmanager
def repeatable(device: str) -> Iterator[None]:
    """A mode in which training a model twice gives the same bits.

    On a GPU the backward passes of many kernels add in the order in which their threads come. torch has others for most of
    them, and for the rest a warning; those of fused attention take theirs only where a warning would not do, so that attention
    is computed in steps here.
    """
    if device != "cuda":
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
