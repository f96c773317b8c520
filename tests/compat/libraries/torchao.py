"""Weights quantised by torchao: tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.compat.cases import Case

TITLE = "torchao"
REQUIRES = ("torchao", "transformers")


def _quantized(config: str, **options: Any) -> Callable[[str], Any]:
    def build(device: str) -> Any:
        from torchao import quantization

        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).to(device, torch.bfloat16).eval()
        quantization.quantize_(model, getattr(quantization, config)(**options))
        return model

    return build


def _llama(device: str) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).to(device, torch.bfloat16).eval()
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _run(model: Any, device: str) -> Any:
    return model(torch.linspace(-1, 1, 256, device=device).reshape(2, 128).to(torch.bfloat16))


def _still_quantized(attached: Any, own: Any, device: str) -> None:
    """The weights are of torchao's class in the client too."""
    assert type(attached[0].weight) is type(own[0].weight)
    assert isinstance(attached[0].weight, torch.Tensor)
    assert type(attached[0].weight) not in (torch.Tensor, nn.Parameter)


_CLASS = {"the class of the weights": _still_quantized}

CASES = {
    "int8 weight-only": Case(_quantized("Int8WeightOnlyConfig"), _run, compiled=("aot_eager",), besides=_CLASS),
    "int8 dynamic": Case(_quantized("Int8DynamicActivationInt8WeightConfig"), _run, besides=_CLASS),
    "int4 in int8": Case(_quantized("IntxWeightOnlyConfig", weight_dtype=torch.int4), _run, besides=_CLASS),
    "a Llama, int8 weight-only": Case(_llama, lambda m, d: m(torch.tensor([[1, 17, 42, 5]], device=d)).logits),
    "float8 weight-only": Case(_quantized("Float8WeightOnlyConfig"), _run, besides=_CLASS),
}
