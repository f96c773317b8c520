"""Small checkpoints with random weights, written by transformers and read by vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import torch

__all__ = ["FAMILIES", "write", "write_adapter"]

#: Weights much larger than usual, so that one token is far more likely than the next, because kernels differ in the last bits.
_SPREAD = 0.2

#: Heads of 80, because the attention of vLLM 0.32 for AMX, which takes multiples of 32, crashes with SIGILL on some hosts.
_SIZES = {
    "vocab_size": 512, "hidden_size": 160, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": _SPREAD, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

#: The class of transformers for each family, and the options of its configuration besides the sizes.
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen": ("Qwen2", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def write_adapter(folder: Path) -> Path:
    """Write a LoRA adapter for the attention of a Llama, like peft."""
    from safetensors.torch import save_file

    torch.manual_seed(7)
    hidden, rank = _SIZES["hidden_size"], 8
    tensors = {}
    for layer in range(int(_SIZES["num_hidden_layers"])):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, int(hidden), dtype=torch.bfloat16)
        tensors[f"{name}.lora_B.weight"] = torch.randn(int(hidden), rank, dtype=torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"], "base_model_name_or_path": ""}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a checkpoint of a family into a folder, replacing an existing one; other seeds give other weights."""
    import transformers

    name, more = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**_SIZES, **more)
    getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
