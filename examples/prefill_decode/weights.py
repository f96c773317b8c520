"""The weights of a small LLaMA, named like a checkpoint of Hugging Face. All commands::

    shared-rpc serve weights.py &
    mkfifo /tmp/done
    python prefill.py < /tmp/done | python decode.py | tee /tmp/done

The two engines map the weights read-only. Replace ``make`` by ``safetensors.torch.load_file`` for real weights.
"""

from dataclasses import dataclass

import torch

from shared_rpc import Provider

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32

provider = Provider()


@dataclass(frozen=True)
class Config:
    width: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 1536
    vocabulary: int = 4096
    block: int = 16  # positions of a block of the KV cache

    @property
    def head_size(self) -> int:
        return self.width // self.heads


CONFIG = Config()


def make() -> dict[str, torch.Tensor]:
    """Return random weights, equal in every process."""
    config, generator = CONFIG, torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(std=2 * shape[-1] ** -0.5, generator=generator)

    def ones() -> torch.Tensor:
        return torch.ones(config.width, dtype=DTYPE, device=DEVICE)

    kv_width = config.kv_heads * config.head_size
    weights = {"model.embed_tokens.weight": random(config.vocabulary, config.width)}
    for layer in range(config.layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones(),
            f"{name}.self_attn.q_proj.weight": random(config.width, config.width),
            f"{name}.self_attn.k_proj.weight": random(kv_width, config.width),
            f"{name}.self_attn.v_proj.weight": random(kv_width, config.width),
            f"{name}.self_attn.o_proj.weight": random(config.width, config.width),
            f"{name}.post_attention_layernorm.weight": ones(),
            f"{name}.mlp.gate_proj.weight": random(config.hidden, config.width),
            f"{name}.mlp.up_proj.weight": random(config.hidden, config.width),
            f"{name}.mlp.down_proj.weight": random(config.width, config.hidden),
        }
    return weights | {"model.norm.weight": ones(), "lm_head.weight": random(config.vocabulary, config.width)}


@provider.share(managed=True, access="read")
def load_weights() -> dict[str, torch.Tensor]:
    return make()
