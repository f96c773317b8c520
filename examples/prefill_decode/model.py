"""A custom decoder, whose parameter names differ from those of the checkpoint: LAYER_MAP maps them.

RMSNorm, rotary positions, grouped-query attention over a block KV cache, SwiGLU.
"""

import torch
from torch import nn
from torch.nn import functional as F
from weights import CONFIG, DTYPE, Config

from shared_rpc import Handle, materialize

#: Parts of the checkpoint's names, and of the decoder's.
LAYER_MAP = {
    "model.layers.": "blocks.",
    "model.embed_tokens.": "embedding.",
    "input_layernorm.": "attention_norm.",
    "self_attn.q_proj.": "attention.query.",
    "self_attn.k_proj.": "attention.key.",
    "self_attn.v_proj.": "attention.value.",
    "self_attn.o_proj.": "attention.out.",
    "post_attention_layernorm.": "mlp_norm.",
    "mlp.gate_proj.": "gate.",
    "mlp.up_proj.": "up.",
    "mlp.down_proj.": "down.",
    "model.norm.": "norm.",
    "lm_head.": "head.",
}


def renamed(name: str) -> str:
    """Return the decoder's name of a tensor of the checkpoint."""
    for theirs, ours in LAYER_MAP.items():
        name = name.replace(theirs, ours)
    return name


class Rotary(nn.Module):
    """Computed tables, which no checkpoint contains."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: int, positions: int = 2048) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        even, odd = x.float().chunk(2, -1)
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_size
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary, cache: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        """``cache`` is this layer's: (2, blocks, block, kv_heads, head_size); ``blocks`` are those of the request, in order."""
        config, count = self.config, len(positions)
        query = rotary(self.query(x).view(count, config.heads, -1), positions)
        key = rotary(self.key(x).view(count, config.kv_heads, -1), positions)
        value = self.value(x).view(count, config.kv_heads, -1)
        block, place = blocks[positions // config.block], positions % config.block
        cache[0, block, place], cache[1, block, place] = key, value
        # All positions of the request so far, gathered from its blocks.
        keys, values = (part[blocks].flatten(0, 1)[: int(positions[-1]) + 1] for part in cache)
        query, keys, values = (x.transpose(0, 1)[None] for x in (query, keys, values))
        attended = F.scaled_dot_product_attention(query, keys, values, is_causal=count > 1, enable_gqa=True)
        return self.out(attended[0].transpose(0, 1).reshape(count, -1))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary, cache: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions, rotary, cache, blocks)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.rotary = Rotary(config.head_size)
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    @torch.no_grad()
    def forward(self, tokens: list[int], first: int, cache: torch.Tensor, blocks: list[int]) -> int:
        """Return the most likely token after ``tokens``, which begin at position ``first``; write to the cache."""
        device = self.head.weight.device
        positions = torch.arange(first, first + len(tokens), device=device)
        used = torch.tensor(blocks, device=device)
        x = self.embedding(torch.tensor(tokens, device=device))
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            x = block(x, positions, self.rotary, layer_cache, used)
        return int(self.head(self.norm(x[-1:])).argmax())


def cache_shape(blocks: int) -> tuple[int, ...]:
    """Return layers, keys and values, blocks, positions of a block, heads, elements of a head."""
    return (CONFIG.layers, 2, blocks, CONFIG.block, CONFIG.kv_heads, CONFIG.head_size)


def build(weights: Handle[dict[str, torch.Tensor]] | dict[str, torch.Tensor]) -> Decoder:
    """Build a decoder around these weights, without copying them."""
    torch.set_default_dtype(DTYPE)
    with materialize(weights, rename=renamed):
        return Decoder(CONFIG).eval()


def generate(model: Decoder, cache: torch.Tensor, token: int, length: int, new: int, blocks: list[int]) -> list[int]:
    """Return ``new`` tokens, the first of which is ``token``, after a prompt whose keys and values are in the cache."""
    tokens = [token]
    while len(tokens) < new:
        tokens.append(model(tokens[-1:], length + len(tokens) - 1, cache, blocks))
    return tokens
