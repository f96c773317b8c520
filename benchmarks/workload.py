"""Endpoints of the compared servers: the same functions, the same tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.models import SHAPES, Chain, Decoder, fill, largest_storage

__all__ = ["SMALL", "Workload"]

#: Elements of a small tensor: 4 KiB of float32.
SMALL = 1024


class Workload:
    """The endpoints' functions, on one device.

    :param checkpoint: a folder; models are loaded from a file in it, which is written when it is first needed.
    """

    def __init__(self, device: str, checkpoint: Path | None = None) -> None:
        self.device = torch.device(device)
        self.checkpoint = checkpoint
        #: Called when a model is in memory, before anything is done with it.
        self.when_loaded: Callable[[], None] = lambda: None
        #: Of the last model: seconds its loading took, bytes of its largest storage.
        self.load_seconds = 0.0
        self.largest_storage = 0
        # What torch imports with the first module on the meta device is no part of loading.
        self._make(lambda: Chain(1, 4))

    def model(self, shape: str) -> torch.nn.Module:
        """Build a decoder of one of the shapes in :data:`benchmarks.models.SHAPES`. Managed, cached."""
        if self.checkpoint is None:
            return self._built(lambda: Decoder(SHAPES[shape]).to(torch.bfloat16))
        path = self.checkpoint / f"{shape}.pt"
        if not path.exists():
            self.checkpoint.mkdir(parents=True, exist_ok=True)
            torch.save(self._make(lambda: Decoder(SHAPES[shape]).to(torch.bfloat16)).state_dict(), path)
        return self._loaded(shape, path)

    def chain(self, tensors: int, nbytes: int) -> torch.nn.Module:
        """Build a module of that many tensors of one size. Managed, cached."""
        return self._built(lambda: Chain(tensors, nbytes))

    def small(self) -> torch.Tensor:
        """Return a small tensor. Direct, cached."""
        return torch.ones(SMALL, device=self.device)

    def fresh(self) -> torch.Tensor:
        """Return a small tensor, a new one every time. Direct, not cached."""
        return torch.ones(SMALL, device=self.device)

    async def fresh_on_loop(self) -> torch.Tensor:
        """Return as :meth:`fresh`, without a thread where the server has that. Direct, not cached."""
        return self.fresh()

    async def echo_on_loop(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return as :meth:`echo`, without a thread. Direct, not cached."""
        return tensor

    def plus_one(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor like the argument, a new one every time. Direct, not cached."""
        return tensor + 1

    def nothing(self) -> None:
        """Return nothing, without memory. Direct, not cached."""

    def kept(self) -> torch.Tensor:
        """Return a small tensor. Managed, cached."""
        return torch.ones(SMALL, device=self.device)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the argument itself. Direct, not cached."""
        return tensor

    def _make(self, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        # No time for an initialisation that nobody reads.
        with torch.device("meta"):
            module = make()
        module = module.to_empty(device=self.device)
        fill(module)
        return module.eval()

    def _built(self, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        begin = time.perf_counter()
        return self._done(self._make(make), begin)

    def _loaded(self, shape: str, path: Path) -> torch.nn.Module:
        begin = time.perf_counter()
        with torch.device("meta"):
            module = Decoder(SHAPES[shape]).to(torch.bfloat16)
        # On the host a mapped file would be read only when somebody uses it.
        state = torch.load(path, map_location=self.device, mmap=self.device.type == "cuda", weights_only=True)
        module.load_state_dict(state, assign=True)
        return self._done(module.eval(), begin)

    def _done(self, module: torch.nn.Module, begin: float) -> torch.nn.Module:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.load_seconds = time.perf_counter() - begin
        self.largest_storage = largest_storage(module)
        self.when_loaded()
        return module
