"""Linear layers of bitsandbytes."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from tests.compat.cases import Case

TITLE = "bitsandbytes"
REQUIRES = ("bitsandbytes", "transformers", "accelerate")


def _eight_bit(device: str) -> Any:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    return nn.Sequential(layer, nn.ReLU()).to(device).eval()


def _four_bit(kind: str) -> Any:
    def build(device: str) -> Any:
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(64, 64, quant_type=kind, compute_dtype=torch.float32)
        return nn.Sequential(layer, nn.ReLU()).to(device).eval()

    return build


def _llama(**options: Any) -> Any:
    def build(device: str) -> Any:
        from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        with tempfile.TemporaryDirectory() as folder:
            LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(folder)
            config = BitsAndBytesConfig(**options)
            return LlamaForCausalLM.from_pretrained(
                folder, quantization_config=config, device_map={"": device}, dtype=torch.float32
            ).eval()

    return build


def _run(model: Any, device: str) -> Any:
    return model(torch.linspace(-1, 1, 128, device=device).reshape(2, 64))


def _logits(model: Any, device: str) -> Any:
    return model(torch.tensor([[1, 17, 42, 5]], device=device)).logits


CASES = {
    "Linear8bitLt": Case(_eight_bit, _run, remembers=True),
    "Linear4bit, nf4": Case(_four_bit("nf4"), _run, remembers=True),
    "Linear4bit, fp4": Case(_four_bit("fp4"), _run, remembers=True),
    "a Llama in 4 bits": Case(_llama(load_in_4bit=True), _logits, remembers=True, ignored="name_or_path"),
    "a Llama in 8 bits": Case(_llama(load_in_8bit=True), _logits, remembers=True, ignored="name_or_path"),
}
