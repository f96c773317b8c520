"""One process that attaches to the servers of all ranks, and computes with all parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from model import Transformer
from torch import Tensor


@torch.inference_mode()
def forward(ranks: Sequence[Transformer], tokens: Tensor) -> Tensor:
    """The logits of the whole model, on the first rank's device. Every rank computes where its part lives.

    What processes of their own would exchange is here a sum, or a concatenation.
    """
    devices = [rank.lm_head.weight.device for rank in ranks]

    def total(parts: list[Tensor]) -> Tensor:
        return torch.stack([part.to(devices[0]) for part in parts]).sum(0)

    x = ranks[0].embed_tokens(tokens.to(devices[0]))
    for blocks in zip(*(rank.layers for rank in ranks), strict=True):
        x = x + total([block.attention(block.input_norm(x.to(there))) for block, there in zip(blocks, devices, strict=True)])
        x = x + total([block.mlp(block.post_norm(x.to(there))) for block, there in zip(blocks, devices, strict=True)])
    logits = [rank.lm_head(rank.norm(x.to(there))) for rank, there in zip(ranks, devices, strict=True)]
    return torch.cat([part.to(devices[0]) for part in logits], -1)
