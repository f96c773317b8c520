"""Modes of a process in which people load models, or attach them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["CLIENT_MODES", "SERVER_MODES", "mode"]

SERVER_MODES = ("default dtype bfloat16", "default device", "no_grad")
CLIENT_MODES = ("default dtype bfloat16", "default device meta", "no_grad", "inference_mode", "autocast")


@contextlib.contextmanager
def mode(name: str, device: str) -> Iterator[None]:
    """A mode, as it is set for a whole process or around a call."""
    if name == "default dtype bfloat16":
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
    elif name.startswith("default device"):
        torch.set_default_device("meta" if name.endswith("meta") else device)
        try:
            yield
        finally:
            torch.set_default_device(None)
    elif name == "autocast":
        with torch.autocast(device, dtype=torch.bfloat16):
            yield
    else:
        with getattr(torch, name)():
            yield
