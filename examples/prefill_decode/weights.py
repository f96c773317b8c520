"""The server's part: the weights of a small LLaMA, as a checkpoint of Hugging Face has them.

    shared-rpc serve examples/prefill_decode/weights.py

The two engines (engine.py) map what this builds, read-only. Replace ``make`` by ``safetensors.torch.load_file`` for real ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared_rpc import Provider

provider = Provider()


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    block: int = 16  # positions of a block of the KV cache

    @property
    def head_size(self) -> int:
        return self.width // self.heads


SIZES = {
    "warm-up": Config(width=64, layers=1, heads=4, kv_heads=2, hidden=64, vocabulary=128),
    "tiny": Config(width=256, layers=8, heads=8, kv_heads=2, hidden=768, vocabulary=2048),
    "small": Config(width=512, layers=8, heads=8, kv_heads=4, hidden=1536, vocabulary=4096),
    "large": Config(width=4096, layers=16, heads=32, kv_heads=8, hidden=14336, vocabulary=32000),
}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def make(size: str) -> dict[str, torch.Tensor]:
    """The same random weights for everybody who asks."""
    config = SIZES[size]
    generator = torch.Generator(device()).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype(), device=device())
        return values.normal_(std=2 * shape[-1] ** -0.5, generator=generator)

    kv_width = config.kv_heads * config.head_size
    weights = {"model.embed_tokens.weight": random(config.vocabulary, config.width)}
    for layer in range(config.layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(config.width, dtype=dtype(), device=device()),
            f"{name}.self_attn.q_proj.weight": random(config.width, config.width),
            f"{name}.self_attn.k_proj.weight": random(kv_width, config.width),
            f"{name}.self_attn.v_proj.weight": random(kv_width, config.width),
            f"{name}.self_attn.o_proj.weight": random(config.width, config.width),
            f"{name}.post_attention_layernorm.weight": torch.ones(config.width, dtype=dtype(), device=device()),
            f"{name}.mlp.gate_proj.weight": random(config.hidden, config.width),
            f"{name}.mlp.up_proj.weight": random(config.hidden, config.width),
            f"{name}.mlp.down_proj.weight": random(config.width, config.hidden),
        }
    weights["model.norm.weight"] = torch.ones(config.width, dtype=dtype(), device=device())
    weights["lm_head.weight"] = random(config.vocabulary, config.width)
    return weights


@provider.share(managed=True, access="read")
def load_weights(size: str) -> dict[str, torch.Tensor]:
    return make(size)
