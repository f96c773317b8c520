"""Tensors other than plain ones, and their containers: layouts, subclasses, dtypes."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from tests.compat.cases import Case
from tests.compat.libraries.torch import alone, layers, ramp

TITLE = "torch: tensors"
REQUIRES = ("numpy",)


def _quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a layout is in beta
        return make()


def _dtypes(device: str) -> Any:
    floats = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
    made: dict[str, Any] = {str(dtype): torch.linspace(-1, 1, 6, device=device).to(dtype) for dtype in floats}
    made["bool"] = torch.tensor([True, False], device=device)
    made["conjugate"] = made["torch.complex64"].conj()
    made["transposed"] = torch.arange(6.0, device=device).reshape(2, 3).T
    made["expanded"] = torch.ones(1, device=device).expand(3, 4)
    made["scalar"] = torch.tensor(3, device=device)
    made["empty"] = torch.empty(0, 3, device=device)
    return made


def _quantized(device: str) -> Any:
    floats = torch.linspace(-1, 1, 8).reshape(2, 4)
    return _quietly(
        lambda: [
            torch.quantize_per_tensor(floats, 0.1, 2, torch.qint8),
            torch.quantize_per_channel(floats, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8),
        ]
    )


class Marked(torch.Tensor):
    """A subclass over memory of its own, with an attribute."""

    note: str


def _subclass(device: str) -> Any:
    tensor = torch.arange(6.0, device=device).as_subclass(Marked)
    tensor.note = "kept"
    return tensor


def _wrapper(device: str) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    module = nn.Linear(4, 4, device=device)
    module.weight = nn.Parameter(TwoTensor(module.weight.detach(), module.weight.detach() * 2), requires_grad=False)
    return module.requires_grad_(False)


def _sparse(layout: str) -> Callable[[str], Any]:
    def build(device: str) -> Any:
        blocks = ((2, 2),) if layout.startswith("bs") else ()
        return _quietly(lambda: getattr(torch.eye(6, device=device), f"to_sparse_{layout}")(*blocks))

    return build


def _coo(device: str) -> Any:
    return torch.eye(6, device=device).to_sparse().coalesce()


def _rows(device: str) -> list[torch.Tensor]:
    return [torch.arange(3.0, device=device), torch.arange(5.0, device=device)]


def _jagged(device: str) -> Any:
    return torch.nested.nested_tensor(_rows(device), layout=torch.jagged)


def _strided_nested(device: str) -> Any:
    return _quietly(lambda: torch.nested.nested_tensor(_rows(device)))


def _packed_sequence(device: str) -> Any:
    return nn.utils.rnn.pack_sequence(_rows(device), enforce_sorted=False)


def _mkldnn(device: str) -> Any:
    return torch.ones(2, 2).to_mkldnn()


def _distributed(device: str) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(torch.ones(2), alone(), [Replicate()], run_check=False)


def _fake(device: str) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, device=device)


def _with_graph(device: str) -> Any:
    module = layers(device)
    return {"scores": module(ramp(module, device, 2, 64))}


@dataclass
class Checkpoint:
    """What a training script keeps."""

    step: int
    weights: dict[str, torch.Tensor]
    scores: list[float] = field(default_factory=list)


Pair = collections.namedtuple("Pair", ["left", "right"])


def _dataclass(device: str) -> Any:
    weights = {name: tensor.detach() for name, tensor in layers(device).named_parameters()}
    return Checkpoint(3, weights, [0.5, float("nan")])


def _containers(device: str) -> Any:
    one = torch.arange(4.0, device=device)
    ordered = collections.OrderedDict(b=one, a=Pair(one, torch.ones(2, device=device)))
    by_default = collections.defaultdict(list, {"x": [one[1:3]]})
    return {"ordered": ordered, "default": by_default, "numbers": {1: one}, "queue": collections.deque([one], 3)}


def _distribution(device: str) -> Any:
    return torch.distributions.Normal(torch.zeros(3, device=device), torch.ones(3, device=device))


CASES = {
    "dtypes and views": Case(_dtypes),
    "containers": Case(_containers),
    "dataclass": Case(_dataclass),
    "distribution": Case(_distribution, lambda t, d: t.log_prob(torch.ones(3, device=d))),
    "PackedSequence": Case(_packed_sequence),
    "subclass": Case(_subclass, lambda t, d: t * 2),
    "wrapper subclass": Case(_wrapper, lambda m, d: m(torch.ones(2, 4, device=d))),
    "quantized": Case(_quantized, lambda ts, d: [t.dequantize() for t in ts], devices=("cpu",)),
    "sparse COO": Case(_coo, lambda t, d: t @ torch.ones(6, 2, device=d)),
    "sparse CSR": Case(_sparse("csr"), refused="has the layout torch.sparse_csr"),
    "sparse CSC": Case(_sparse("csc"), refused="has the layout torch.sparse_csc"),
    "sparse BSR": Case(_sparse("bsr"), refused="has the layout torch.sparse_bsr"),
    "sparse BSC": Case(_sparse("bsc"), refused="has the layout torch.sparse_bsc"),
    "nested, jagged": Case(_jagged, lambda t, d: (t * 2).values()),
    "nested, strided": Case(_strided_nested, refused="layout=torch.jagged"),
    "oneDNN": Case(_mkldnn, refused="has the layout torch._mkldnn", devices=("cpu",)),
    "DTensor": Case(_distributed, refused="is a DTensor"),
    "fake": Case(_fake, refused="is a fake tensor"),
    "with an autograd graph": Case(_with_graph, refused="carries an autograd graph"),
    "a numpy array alone": Case(lambda device: numpy.ones(4), refused="without a tensor or module"),
    "a number": Case(lambda device: 3, refused="without a tensor or module"),
}
