"""Linear layers of bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.compat.cases import Case

REQUIRES = ("bitsandbytes",)


def _eight_bit(device: str) -> Any:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    return nn.Sequential(layer, nn.ReLU()).to(device).eval()


def _four_bit(kind: str) -> Any:
    def build(device: str) -> Any:
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(64, 64, quant_type=kind, compute_dtype=torch.float32)
        return nn.Sequential(layer, nn.ReLU()).to(device).eval()

    return build


def _embedding(device: str) -> Any:
    import bitsandbytes

    return bitsandbytes.nn.StableEmbedding(16, 8).to(device).eval()


def _run(model: Any, device: str) -> Any:
    return model(torch.linspace(-1, 1, 128, device=device).reshape(2, 64))


CASES = {
    "Linear8bitLt": Case(_eight_bit, _run, modes=True, remembers=True),
    "Linear4bit, nf4": Case(_four_bit("nf4"), _run, remembers=True),
    "Linear4bit, fp4": Case(_four_bit("fp4"), _run, remembers=True),
    "StableEmbedding": Case(_embedding, lambda m, d: m(torch.tensor([1, 2, 3], device=d))),
}
