"""A small LLaMA, whole or one rank's part of it; ``python model.py DIRECTORY`` writes random weights to DIRECTORY/model.pt.

A rank computes its own heads and its own part of the MLP. Each layer sums over all ranks after the attention and after
the MLP, so the result is that of the whole model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocabulary: int = 512
    width: int = 256
    hidden: int = 704
    layers: int = 4
    head_width: int = 32
    heads: int = 8
    kv_heads: int = 4  # grouped-query attention: each serves two heads

    def of_rank(self, world: int) -> Config:
        """Return the sizes of the part of one of ``world`` ranks."""
        return replace(
            self,
            vocabulary=self.vocabulary // world,
            hidden=self.hidden // world,
            heads=self.heads // world,
            kv_heads=max(self.kv_heads // world, 1),
        )


CONFIG = Config()


def alone(part: Tensor) -> Tensor:
    """Return the part itself: the exchange between ranks if there is only one."""
    return part


class Attention(nn.Module):
    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.q_proj = nn.Linear(width, config.heads * config.head_width, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_width, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_width, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the contribution of this rank's heads to the output."""
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = nn.functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: Tensor) -> Tensor:
    """Apply rotary position embeddings."""
    length, half = x.shape[2], x.shape[3] // 2
    speeds = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    first, second = x.split(half, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class MLP(nn.Module):
    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, config.hidden, bias=False)
        self.up_proj = nn.Linear(width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the contribution of this rank's part of SwiGLU to the output."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, config)
        self.post_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = MLP(width, config)


class Transformer(nn.Module):
    """The whole model, or the part of one of ``world`` ranks."""

    def __init__(self, config: Config = CONFIG, world: int = 1) -> None:
        super().__init__()
        part = config.of_rank(world)
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config.width, part) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.lm_head = nn.Linear(config.width, part.vocabulary, bias=False)

    def forward(
        self, tokens: Tensor, total: Callable[[Tensor], Tensor] = alone, joined: Callable[[Tensor], Tensor] = alone
    ) -> Tensor:
        """Return the logits of every position.

        :param total: sums the tensors that all ranks pass to it.
        :param joined: concatenates them in the order of the ranks.
        """
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = x + total(block.attention(block.input_norm(x)))
            x = x + total(block.mlp(block.post_norm(x)))
        return joined(self.lm_head(self.norm(x)))


def prompts() -> Tensor:
    """Return two sequences of tokens."""
    return torch.randint(CONFIG.vocabulary, (2, 48), generator=torch.Generator().manual_seed(1))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(Transformer().state_dict(), f"{sys.argv[1]}/model.pt")
