"""Checkpoints with random weights in the shapes of real models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.compat.libraries.transformers import CASES, causal

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

#: Models that differ in how they are loaded, by their names in tests/compat.
FAMILIES = {
    name: functools.partial(CASES[name].build, "cpu")
    for name in ("Llama", "Llama, tied", "Mixtral", "BERT", "T5", "Whisper", "ViT", "CLIP")
}


def decoder(**options: Any) -> Any:
    """A small Llama."""
    return causal("LlamaForCausalLM", "LlamaConfig", **options)("cpu")


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
