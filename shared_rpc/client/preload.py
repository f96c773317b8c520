"""Imports that the first call would otherwise wait for."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

__all__ = ["preload_codec"]


def preload_codec() -> None:
    """Load the codec, where torch is loaded already: a process that only lists or releases never needs it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):  # not there, or just being imported
        return
    importlib.import_module("shared_rpc.codec.arguments")
    importlib.import_module("shared_rpc.codec.results")
    if torch.version.cuda is not None:
        with suppress(ImportError):  # told when a GPU is really asked for
            importlib.import_module("shared_rpc.memory.backends.vmm")
