"""Modes of a process in which people attach models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.kit.modes import changed

CLIENT_MODES = ("default dtype bfloat16", "default device meta", "no_grad", "inference_mode", "autocast")


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


def mode(name: str, device: str) -> contextlib.AbstractContextManager[None]:
    """A mode, as it is set for a whole process or around a call."""
    modes: dict[str, Any] = {
        "default dtype bfloat16": lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.get_default_dtype()),
        "default device meta": lambda: changed(torch.set_default_device, "meta", None),
        "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    found: contextlib.AbstractContextManager[None] = modes[name]()
    return found
