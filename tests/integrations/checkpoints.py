"""Checkpoints with random weights in the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

_TEXT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_DECODER = {
    **_TEXT,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PICTURE = {**{name: size for name, size in _TEXT.items() if name != "vocab_size"}, "image_size": 16, "patch_size": 8}
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_WHISPER = {
    **{"vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8},
    **{"max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "decoder_start_token_id": 3,
}
_CLIP = {
    "text_config": {**_TEXT, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": _PICTURE,
    "projection_dim": 16,
}


def decoder(**options: Any) -> Any:
    """A small Llama."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_DECODER, **options}))


#: Models by their families' names.
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": decoder,
    "llama, tied": lambda: decoder(tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_DECODER)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_DECODER, head_dim=8)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_TEXT)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**_WHISPER)),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**_PICTURE)),
    "clip": lambda: transformers.CLIPModel(transformers.CLIPConfig(**_CLIP)),
}


def save(model: Any, folder: Path, seed: int = 0) -> str:
    """Save a model whose weights depend on a seed; return the folder as text."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's inputs."""
    where = {"device": model.device}
    tokens = torch.tensor([[1, 17, 42, 5], [1, 3, 3, 90]], **where)
    floats = {**where, "dtype": model.dtype}
    if model.main_input_name == "input_features":
        return {"input_features": torch.linspace(-1, 1, 512, **floats).reshape(2, 8, 32), "decoder_input_ids": tokens}
    given = {} if model.main_input_name == "pixel_values" else {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens
    if model.main_input_name == "pixel_values" or hasattr(model.config, "vision_config"):
        given["pixel_values"] = torch.linspace(-1, 1, 1536, **floats).reshape(2, 3, 16, 16)
    return given
