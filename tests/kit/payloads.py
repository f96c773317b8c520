"""Payloads of every kind that a call carries, and the properties that it preserves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from tests.kit.deep import deep
from tests.kit.interpreter import bits
from tests.kit.models import Tied

#: Dtypes of payloads: `tests/rules/test_codec.py` has all others too.
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
)

#: Those that torch can negate lazily.
_SIGNED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


# Preserved properties.


def described(value: Any) -> Any:
    """Return a payload as plain data, equal for equal payloads: structure, types, shapes, strides, flags, and every bit.

    Strides that lead to no element are left out.
    """
    if isinstance(value, torch.Tensor):
        layout = (tuple(value.shape), value.stride() if value.numel() else None)
        flags = (value.requires_grad, value.is_conj(), value.is_neg())
        return type(value).__name__, str(value.dtype), value.device.type, layout, flags, bits(value)
    if isinstance(value, nn.Module):
        state = itertools.chain(value.named_parameters(remove_duplicate=False), value.named_buffers(remove_duplicate=False))
        return type(value).__name__, value.training, {name: described(tensor) for name, tensor in state}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(item) for item in value]
    if isinstance(value, dict):
        return type(value).__name__, [(key, described(item)) for key, item in value.items()]
    return type(value).__name__, repr(value)


def aliases(value: Any) -> list[tuple[int, int, bool, int]]:
    """Return the memory shared by tensors of a payload: their numbers, whether they are one object, the offset in bytes."""
    found = list(tensors_in(value))
    return [
        (one, other, found[one] is found[other], found[other].data_ptr() - found[one].data_ptr())
        for one, other in itertools.combinations(range(len(found)), 2)
        if found[one] is found[other] or _overlap(found[one], found[other])
    ]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return all tensors of a payload, in order, with repetitions."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (tensor for _, tensor in value.named_parameters(remove_duplicate=False))
        yield from (tensor for _, tensor in value.named_buffers(remove_duplicate=False))
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    spans = _span(one), _span(other)
    # Views may interleave without a common byte.
    return max(begin for begin, _ in spans) < min(end for _, end in spans) and bool(_addresses(one) & _addresses(other))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin


def _addresses(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of all elements."""
    begin, width = tensor.data_ptr(), tensor.element_size()
    steps = [
        range(0, size * stride, stride) if stride else [0] for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return {begin + sum(element) * width + byte for element in itertools.product(*steps) for byte in range(width)}


# Payloads by name.


def of_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    """Return a tensor of random bits, which may be NaNs."""
    high = 2 if dtype is torch.bool else 256
    count = dtype.itemsize * torch.Size(shape).numel()
    data = torch.randint(0, high, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).reshape(shape).to(device)


def _numbers(*shape: int, device: str) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device=device).reshape(shape)


def _containers(device: str) -> Any:
    scalars = (1, "text", None, 2.5, float("nan"), -0.0, True, 1 - 2j, b"\x00raw", 1 << 70, torch.float16)
    return {
        "list": [_numbers(3, device=device), (_numbers(2, 2, device=device), *scalars)],
        "deep": {"er": [[{"": (_numbers(1, device=device),)}]]},
        "ünïcode": [[], (), {}],
    }


def _views(device: str) -> Any:
    base = _numbers(12, device=device)
    return [base[4:], (base[2:5], {"whole": base, "shaped": base.view(3, 4).T}), base.detach()]


def _views_of_other_dtypes(device: str) -> Any:
    pairs = torch.tensor([1 + 2j, 3 - 4j, -5j], device=device)
    return [pairs, torch.view_as_real(pairs), pairs.imag, pairs[1:].real, _numbers(4, device=device).view(torch.int32)]


def _twice(device: str) -> Any:
    tensor, empty = _numbers(3, device=device), torch.empty(0, device=device)
    return {"one": tensor, "many": [tensor, (tensor, empty)], "empty": empty}


def _small_views(device: str) -> Any:
    large = _numbers(512, 1024, device=device)
    return [large[5], large[5:7, 3:6], large[500, 1000:], large[:, 77][::100], large[300, 3]]


def _lazy(device: str) -> Any:
    base = torch.tensor([[1 + 2j, 3 - 4j], [0j, -1j]], device=device)
    return [base.conj(), base, base.T.conj(), torch._neg_view(base), base.conj().imag, torch._neg_view(base.conj())[1:]]


def _model(device: str) -> Tied:
    model = Tied(device).eval()
    nn.init.constant_(model.head.weight, 3.0)
    return model


def _model_beside_its_weight(device: str) -> Any:
    model = _model(device)
    return [model.head.weight, model, 2]


def _asking_for_gradients(device: str) -> Any:
    leaf = torch.ones(3, device=device, requires_grad=True)
    return [leaf, {"again": leaf}, leaf.detach(), torch.ones(2, device=device)]


def _parameters(device: str) -> Any:
    weight = nn.Parameter(_numbers(2, 3, device=device))
    return [weight, 1, weight, weight.detach(), nn.Parameter(_numbers(2, device=device), requires_grad=False)]


def _empties(device: str) -> Any:
    return [
        torch.empty(0, device=device),
        torch.empty(3, 0, dtype=torch.int8, device=device),
        torch.empty(0, 4, device=device).T,
        _numbers(4, device=device)[2:2],
        _numbers(2, device=device),
    ]


Make = Callable[[str], Any]

PAYLOADS: dict[str, Make] = {
    "containers": _containers,
    "none beside a tensor": lambda device: [None, _numbers(2, device=device)],
    "empty tensors": _empties,
    "channels last": lambda device: _numbers(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
    "overlapping itself": lambda device: _numbers(10, device=device).unfold(0, 4, 1),
    "small views": _small_views,
    "views": _views,
    "views of other dtypes": _views_of_other_dtypes,
    "the same twice": _twice,
    "conjugated and negated": _lazy,
    "asking for gradients": _asking_for_gradients,
    "parameters": _parameters,
    "module beside its weight": _model_beside_its_weight,
}


# Any payload.


def each_payload() -> pytest.MarkDecorator:
    """Run a test for the ``name`` of some payloads, and in ``nox -s deep`` of all.

    Every run sends some payloads through a wire; tests/rules/test_codec.py tests the codec's rules for the others.
    """
    usual = ("containers", "views", "the same twice", "conjugated and negated", "module beside its weight")
    return pytest.mark.parametrize("name", [*usual, *deep(*(name for name in PAYLOADS if name not in usual))])


@dataclass(frozen=True)
class _Number:
    """The number of a payload's tensor. Strategies are kept for later examples, and would keep the tensor itself alive."""

    index: int


_LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=5), st.binary(max_size=5)),
    st.sampled_from(DTYPES),
    st.builds(_Number, st.integers(0, 9)),
)

_NESTED = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


@st.composite
def any_payload(draw: st.DrawFn, device: str) -> Any:
    """Containers of scalars and at least one tensor; tensors may be views of one another, or occur several times."""
    pool: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 4))):
        pool.append(_tensor(draw, device, pool))
    nested = _with_tensors(draw(_NESTED), pool)
    return [*pool, nested] if draw(st.booleans()) else {"tensor": pool[-1], "nested": nested}


def _with_tensors(value: Any, pool: list[torch.Tensor]) -> Any:
    if isinstance(value, _Number):
        return pool[value.index % len(pool)]
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(item, pool) for item in value)
    return {key: _with_tensors(item, pool) for key, item in value.items()} if isinstance(value, dict) else value


def _tensor(draw: st.DrawFn, device: str, earlier: list[torch.Tensor]) -> torch.Tensor:
    """Random bits with some history of views, or a further view of an earlier tensor."""
    if earlier and draw(st.booleans()):
        value = earlier[draw(st.integers(0, len(earlier) - 1))].detach()
    else:
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        value = of_bits(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 1 << 20)), device)
    for step in draw(st.lists(st.sampled_from(["transpose", "narrow", "step", "expand", "conjugate", "negate"]), max_size=4)):
        value = _viewed(draw, value, step)
    kind = draw(st.sampled_from(["plain", "plain", "leaf", "parameter"]))
    if kind == "parameter":
        return nn.Parameter(value, requires_grad=False)
    differentiable = value.is_floating_point() or value.is_complex()
    return value.requires_grad_() if kind == "leaf" and differentiable else value


def _viewed(draw: st.DrawFn, value: torch.Tensor, step: str) -> torch.Tensor:
    if step == "conjugate":
        return value.conj()
    if step == "negate":
        return torch._neg_view(value) if value.dtype in _SIGNED else value
    if step == "expand":
        return value.unsqueeze(0).expand(draw(st.integers(1, 3)), *value.shape) if value.dim() < 4 else value
    if not value.dim():
        return value
    dimension = draw(st.integers(0, value.dim() - 1))
    if step == "transpose":
        return value.transpose(dimension, draw(st.integers(0, value.dim() - 1)))
    size = value.shape[dimension]
    if step == "narrow":
        begin = draw(st.integers(0, size))
        return value.narrow(dimension, begin, draw(st.integers(0, size - begin)))
    return value[(*(slice(None),) * dimension, slice(None, None, draw(st.integers(1, 3))))]
