"""The app that ``shared-rpc serve`` runs: models, each of which is made once and then kept, on its device or below it."""

from __future__ import annotations

import os

import torch
from torch import nn

from shared_rpc import Provider, progress

LAYERS = 8

provider = Provider(device=os.environ.get("ZOO_DEVICE", "auto"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.up = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.up(self.norm(x)))


def width_for(megabytes: int) -> int:
    """The width of a model of about so many MiB."""
    return max(int((megabytes * 2**20 / 4 / LAYERS) ** 0.5) // 64 * 64, 64)


def make(number: int, megabytes: int, device: str) -> nn.Module:
    """Model ``number``: the same bits in every process."""
    width = width_for(megabytes)
    chance = torch.Generator(device).manual_seed(number)
    with torch.device(device):
        model = nn.Sequential(*(Block(width) for _ in range(LAYERS))).requires_grad_(False).eval()
    for layer, block in enumerate(model):
        block.up.weight.normal_(0.0, width**-0.5, generator=chance)
        progress(layer + 1, LAYERS, "layers")
    return model


def question(seed: int, megabytes: int, device: str) -> torch.Tensor:
    """The input of a request."""
    return torch.randn(4, width_for(megabytes), generator=torch.Generator().manual_seed(seed)).to(device)


# The weights do not change: with access="read" one copy of them is good for all evictions.
@provider.share(managed=True, access="read", cache_format_key="{number}")
def load_model(number: int, megabytes: int, device: str) -> nn.Module:
    return make(number, megabytes, device)
