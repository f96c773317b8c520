"""A module of many equal layers, which can be run: what ``benchmarks tiers`` puts to sleep."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Stack", "digest", "make", "question"]

#: Bytes of a layer: a weight of 4096 x 4096 in bfloat16 on a GPU, of 1024 x 1024 in float32 on the host.
LAYER = {"cuda": 32 << 20, "cpu": 4 << 20}
_WIDTH = {"cuda": 4096, "cpu": 1024}
_DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


class Stack(nn.Module):
    """Layers that an input goes through one after the other, so that a pass reads all weights once."""

    def __init__(self, layers: int, kind: str) -> None:
        super().__init__()
        width = _WIDTH[kind]
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=_DTYPE[kind]) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input after all layers."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def make(mebibytes: int, number: int, device: str) -> Stack:
    """Make module ``number``, of so many MiB in whole layers, on a device."""
    kind = torch.device(device).type
    with torch.device("meta"):
        module = Stack(max((mebibytes << 20) // LAYER[kind], 1), kind)
    module = module.to_empty(device=device).requires_grad_(False).eval()
    chance = torch.Generator(device).manual_seed(number)
    for layer in module.layers:
        assert isinstance(layer, nn.Linear), "all of them are"
        layer.weight.normal_(0.0, 0.02, generator=chance)
    return module


def question(module: Stack) -> torch.Tensor:
    """Return an input, the same one every time."""
    weight = next(module.parameters())
    return torch.linspace(-1, 1, weight.shape[1], device=weight.device).to(weight.dtype)[None]


def digest(module: Stack) -> list[float]:
    """Run the module, wait for it, and return some of what came out: equal bits are equal numbers."""
    answer: list[float] = module(question(module))[0, :8].float().tolist()
    return answer
