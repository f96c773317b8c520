"""torch's own quantisation of modules, which runs on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from tests.compat.cases import Case

TITLE = "torch.ao.quantization"
REQUIRES = ()


def _float() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def _dynamic(dtype: torch.dtype) -> Any:
    def build(device: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.ao.quantization.quantize_dynamic(_float(), {nn.Linear}, dtype=dtype)

    return build


def _dynamic_lstm(device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # In a container: a module itself is not replaced.
        model = nn.ModuleDict({"lstm": nn.LSTM(8, 8)}).eval()
        return torch.ao.quantization.quantize_dynamic(model, {nn.LSTM}, dtype=torch.qint8)


def _static(device: str) -> Any:
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = "fbgemm"
        model = nn.Sequential(quantization.QuantStub(), *_float(), quantization.DeQuantStub()).eval()
        model.qconfig = quantization.get_default_qconfig("fbgemm")
        prepared = quantization.prepare(model)
        prepared(torch.linspace(-1, 1, 64).reshape(4, 16))
        return quantization.convert(prepared)


def _static_convolution(device: str) -> Any:
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = "fbgemm"
        parts = (quantization.QuantStub(), nn.Conv2d(3, 4, 3), nn.ReLU(), quantization.DeQuantStub())
        model = nn.Sequential(*parts).eval()
        model.qconfig = quantization.get_default_qconfig("fbgemm")
        prepared = quantization.prepare(model)
        prepared(torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4))
        return quantization.convert(prepared)


def _embedding(device: str) -> Any:
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Embedding(16, 8)).eval()
        model.qconfig = quantization.float_qparams_weight_only_qconfig
        return quantization.convert(quantization.prepare(model))


def _prepared(device: str) -> Any:
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(quantization.QuantStub(), *_float(), quantization.DeQuantStub()).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        prepared = quantization.prepare_qat(model)
        # The first pass gives what it observes its shape; memory that is shared cannot become larger.
        prepared(torch.linspace(-1, 1, 64).reshape(4, 16))
        return prepared.apply(quantization.disable_observer).eval()


def _run(module: Any, device: str) -> Any:
    return module(torch.linspace(-1, 1, 32).reshape(2, 16))


CASES = {
    "dynamic int8": Case(_dynamic(torch.qint8), _run, devices=("cpu",)),
    "dynamic int8, on a GPU's server": Case(_dynamic(torch.qint8), refused="is packed for the CPU", devices=("cuda",)),
    "dynamic float16": Case(_dynamic(torch.float16), _run, devices=("cpu",)),
    "dynamic int8 LSTM": Case(_dynamic_lstm, lambda m, d: m["lstm"](torch.ones(2, 1, 8))[0], devices=("cpu",)),
    "static int8": Case(_static, _run, devices=("cpu",)),
    "static int8 convolution": Case(
        _static_convolution, lambda m, d: m(torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)), devices=("cpu",)
    ),
    "int8 embedding": Case(_embedding, lambda m, d: m(torch.tensor([1, 2, 3])), devices=("cpu",)),
    "quantisation-aware": Case(_prepared, _run, writes=True, devices=("cpu",)),
}
