"""Two models: ResNet-18, whose BatchNorm has buffers, and a small LLaMA. Nothing here knows that weights are shared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition" (2015): images ``(n, 3, h, w)`` to logits ``(n, classes)``."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages: list[nn.Module] = []
        channels = width
        for stage in range(4):
            for number in range(2):
                out = width << stage
                stages.append(Block(channels, out, 2 if stage and not number else 1))
                channels = out
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


@dataclass(frozen=True)
class Shape:
    """What sizes a LLaMA has."""

    vocabulary: int = 4096
    width: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 768


def rotate(x: Tensor) -> Tensor:
    """Rotary positions for ``(batch, heads, tokens, size)``."""
    tokens, size = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(tokens, device=x.device, dtype=torch.float32), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.groups = shape.heads // shape.kv_heads
        self.q = nn.Linear(shape.width, shape.heads * self.size, bias=False)
        self.kv = nn.Linear(shape.width, 2 * shape.kv_heads * self.size, bias=False)
        self.out = nn.Linear(shape.heads * self.size, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q(x), *self.kv(x).chunk(2, dim=-1)))
        k, v = (part.repeat_interleave(self.groups, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated feed-forward network, each before a residual sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.width, eps=1e-5), nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens ``(n, length)`` to the logits of the next one, ``(n, vocabulary)``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))[:, -1]))


def architecture(name: str, config: dict[str, int]) -> nn.Module:
    """A model as its file describes it, on torch's current device: on "meta" it has no memory."""
    return (ResNet18(**config) if name == "resnet18" else Llama(Shape(**config))).eval()
