"""Nested payloads that calls and records carry. tests/rules/test_codec.py has the codec's rules for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.kit.models import Tied


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return all tensors of a payload of containers, in order, with repetitions."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _numbers(*shape: int, device: str) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device=device).reshape(shape)


def _containers(device: str) -> Any:
    scalars = (1, "text", None, 2.5, float("nan"), -0.0, True, 1 - 2j, b"\x00raw", 1 << 70, torch.float16)
    return {
        "list": [_numbers(3, device=device), (_numbers(2, 2, device=device).requires_grad_(), *scalars)],
        "deep": {"er": [[{"": (_numbers(1, device=device),)}]]},
        "ünïcode": [[], (), {}],
    }


def _views(device: str) -> Any:
    base = _numbers(12, device=device)
    return [base[4:], (base[2:5], {"whole": base, "shaped": base.view(3, 4).T}), base.detach(), base.view(torch.int32)[3:]]


def _twice(device: str) -> Any:
    tensor, empty = _numbers(3, device=device), torch.empty(0, device=device)
    return {"one": tensor, "many": [tensor, (tensor, empty)], "empty": empty}


def _lazy(device: str) -> Any:
    base = torch.tensor([[1 + 2j, 3 - 4j], [0j, -1j]], device=device)
    return [base.conj(), base, base.T.conj(), torch._neg_view(base), base.conj().imag, torch._neg_view(base.conj())[1:]]


def _model_beside_its_weight(device: str) -> Any:
    model = Tied(device).eval()
    nn.init.constant_(model.head.weight, 3.0)
    return [model.head.weight, model, 2]


PAYLOADS: dict[str, Callable[[str], Any]] = {
    "containers": _containers,
    "views": _views,
    "the same twice": _twice,
    "conjugated and negated": _lazy,
    "module beside its weight": _model_beside_its_weight,
}
