"""Modules to share: a decoder with the shapes of Llama 3, and modules of any number of tensors and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["SHAPES", "Chain", "Decoder", "Shape", "fill", "largest_storage"]


@dataclass(frozen=True)
class Shape:
    """Sizes that determine the tensors of a decoder; weights are bfloat16."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    # 291 tensors, 16.06 GB: https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
    "llama-3-8b": Shape(32, 4096, 14336, 32, 8, 128256),
    # 291 tensors too, 109 MB.
    "small": Shape(32, 512, 512, 32, 8, 8192),
    # 21 tensors, for trying things out.
    "tiny": Shape(2, 64, 128, 4, 2, 256),
}


class Attention(nn.Module):
    """The projections of grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        narrow = shape.hidden // shape.heads * shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)


class Mlp(nn.Module):
    """The projections of a gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)


class Layer(nn.Module):
    """One decoder layer: nine tensors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden)


class Decoder(nn.Module):
    """A decoder's weights. It is shared, not run, so it has no ``forward``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)


class Weight(nn.Module):
    """A module with one tensor."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(elements))


class Chain(nn.Module):
    """``tensors`` tensors of one size, each in a module of its own, ``nbytes`` bytes in all."""

    def __init__(self, tensors: int, nbytes: int) -> None:
        super().__init__()
        elements = max(nbytes // tensors // torch.get_default_dtype().itemsize, 1)
        self.links = nn.ModuleList(Weight(elements) for _ in range(tensors))


def fill(module: nn.Module) -> None:
    """Give every parameter values that tell it from the others."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.fill_(1 + number % 100)


def largest_storage(module: nn.Module) -> int:
    """Return the bytes of the largest tensor of a module."""
    return max(parameter.untyped_storage().nbytes() for parameter in module.parameters())
