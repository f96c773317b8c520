"""Unshareable values are refused: each kind with its path, the reason, and a remedy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shared_rpc.codec.results import publish
from shared_rpc.errors import CapabilityError
from tests.kit.subjects import plus_one, quietly

_opened: list[IO[Any]] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close files that a test opened."""
    yield
    while _opened:
        _opened.pop().close()


def _reading() -> Any:
    _opened.append(open(__file__, encoding="utf-8"))  # noqa: SIM115  closed by the fixture
    return _opened[-1]


def _quiet(make: Callable[[], Any]) -> Any:
    with quietly():
        return make()


def _traced(transform: Callable[..., Any]) -> torch.Tensor:
    """Return a tensor that belongs to a transform."""
    seen: list[torch.Tensor] = []
    transform(lambda x: (seen.append(x), x.sum())[1])(torch.ones(2))
    return seen[0]


def _fake(make: Callable[[], Any]) -> Any:
    with FakeTensorMode():
        return make()


class LeavesOut:
    """An object whose pickled state excludes its lock."""

    def __init__(self, lock: Any, file: Any) -> None:
        self.lock, self.file = lock, file

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file}


def _closed_socket() -> socket.socket:
    """Return a socket that the error's traceback may keep without a warning."""
    with socket.socket() as closed:
        return closed


#: Attributes that cannot be shared, each with the reason and the remedy. tests/compat has further classes of torch.
ATTRIBUTES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "text file": (_reading, "", "is an open file of this process: keep its path"),
    "socket": (_closed_socket, "", "is a socket of this process: keep its address"),
    "lock": (threading.Lock, "", "cannot pickle '_thread.lock' object; make it in each process, or leave it out in a __getst"),
    "generator": (lambda: (number for number in range(3)), "", "cannot pickle 'generator' object"),
    "scripted function": (lambda: _quiet(lambda: torch.jit.script(plus_one)), "", "is TorchScript"),
    "operator": (
        lambda: torch.ops.aten.add,
        "",
        "is an operator of torch: keep its name, and look it up in torch.ops",
    ),
    "meta tensor": (lambda: torch.empty(2, device="meta"), "", "is on the meta device"),
    "lazy module": (lambda: _quiet(lambda: nn.LazyLinear(3)), ".weight", "run the module once"),
    "csr tensor": (
        lambda: _quiet(lambda: torch.eye(2).to_sparse_csr()),
        "",
        "cannot be bound to shared memory: share tensor.to_sparse_coo() or tensor.to_dense()",
    ),
    "mkldnn tensor": (lambda: torch.ones(2, 2).to_mkldnn(), "", "cannot be bound to shared memory: share tensor.to_dense()"),
    "lock as a key": (lambda: {"first": 1, threading.Lock(): 2}, ".<key 1>", "cannot pickle '_thread.lock' object"),
    "lock that is left out": (lambda: LeavesOut(threading.Lock(), _reading()), ".file", "is an open file of this process"),
    "stream": (lambda: torch.Stream(device="cpu"), "", "is a stream, which belongs to this process: make one in each process"),
    "fake tensor": (lambda: _fake(lambda: torch.ones(2)), "", "is a fake tensor, which has no memory"),
    "functional tensor": (lambda: torch._to_functional_tensor(torch.ones(2)), "", "is a functional tensor, which exists only"),
    "tensor of vmap": (lambda: _traced(torch.vmap), "", "belongs to a transform of torch.func: share the result"),
    "strided nested tensor": (
        lambda: _quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "",
        "is a nested tensor of the strided layout: use layout=torch.jagged",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_unshareable_attributes_are_refused(name: str) -> None:
    """The error has the attribute path, the reason, and the remedy; nothing is shared as something else."""
    make, path, reason = ATTRIBUTES[name]
    value = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    value[1][0].kept = make()
    with pytest.raises(CapabilityError) as caught:
        publish(value, "cpu", "read_write", "load")
    assert f"endpoint 'load': result.1.0.kept{path} " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", [name for name, (_, path, _) in ATTRIBUTES.items() if "tensor" in name.lower() and not path])
def test_unshareable_tensors_are_refused_as_results(name: str) -> None:
    """The same error if such a tensor is the whole result."""
    make, _, reason = ATTRIBUTES[name]
    with pytest.raises(CapabilityError, match=r"endpoint 'load': result ") as caught:
        publish(make(), "cpu", "read_write", "load")
    assert reason in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_stay_on_the_cpu() -> None:
    """With memory shared on a GPU they are refused: no ``.to()`` moves them. There they are shared."""
    model = nn.ModuleDict({"model": nn.ModuleDict({"fc": nn.Linear(2, 2)})}).eval()
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    publish(model, "cpu", "read_write", "load").close()
    with pytest.raises(CapabilityError) as caught:
        publish(model, "cuda", "read_write", "load")
    text = str(caught.value)
    assert "endpoint 'load': result.model.fc._packed_params._packed_params is packed for the CPU" in text
    assert "choose device='cpu' for the Provider, or share the module before it is quantised" in text
    assert ".to('cuda')" not in text
