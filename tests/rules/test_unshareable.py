"""Unshareable values are refused: each kind with its path, the reason, and a remedy, as are tensors left on the host."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.optim.swa_utils import AveragedModel

from shared_rpc.codec.arguments import encode_arguments, lower_arguments
from shared_rpc.codec.payload import dump_result
from shared_rpc.codec.results import publish
from shared_rpc.errors import CapabilityError
from tests.kit.models import State
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


# Tensors on the host, with memory that is shared on a GPU.


def test_devices_in_objects_are_translated(device: str, rebuilt: Callable[..., Any]) -> None:
    """To the reader's own name for the same device."""
    where = torch.ones(1, device=device).device
    assert rebuilt(State(1, {"m": torch.ones(1, device=device), "at": where})).moments["at"] == where


def _optimizer() -> torch.optim.Optimizer:
    weight = torch.empty(0, requires_grad=True)  # an empty one may be anywhere
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight] = {"step": torch.tensor(3.0)}
    return optimizer


def _schedule() -> Any:
    return pytest.importorskip("diffusers").DDPMScheduler(num_train_timesteps=10)


def _averaged() -> torch.nn.Module:
    return AveragedModel(torch.nn.Identity())


def _packed() -> PackedSequence:
    return PackedSequence(torch.empty(1, 0), torch.tensor([1]))


@pytest.mark.parametrize(
    "make", [_optimizer, _schedule, _averaged, _packed], ids=["optimizer", "schedule", "averaged model", "packed sequence"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_host_state_of_known_objects_stays_on_the_host(make: Callable[[], Any]) -> None:
    """With memory shared on a GPU, such tensors on the host are allowed."""
    _, scan = dump_result([torch.nn.Identity(), State(1, {"m": make()})], "load", "cuda")
    assert scan.storages
    assert {storage.device.type for storage in scan.storages} == {"cpu"}


@pytest.mark.parametrize(
    "make, path",
    [
        (lambda: torch.nn.Linear(1, 1), "result[1].weight"),
        (lambda: State(1, {"m": torch.ones(1)}), "result[1].moments['m']"),
        (lambda: State(1, {"m": _optimizer(), "t": torch.ones(1)}), "result[1].moments['t']"),
        (lambda: PackedSequence(torch.ones(1, 1), torch.tensor([1])), "result[1][0]"),
    ],
    ids=["parameter", "dataclass", "beside an optimizer", "in a packed sequence"],
)
def test_other_host_tensors_are_refused(make: Callable[[], Any], path: str) -> None:
    """A tensor on the host anywhere else was forgotten there: the error has its path."""
    with pytest.raises(CapabilityError) as caught:
        dump_result([torch.nn.Identity(), make()], "load", "cuda")
    assert f"endpoint 'load': {path} is on cpu, but memory is shared on 'cuda' here: move it with .to(" in str(caught.value)


@pytest.mark.parametrize(
    "lower",
    # Sending waits for the GPU.
    [
        pytest.param(lambda *call: encode_arguments(*call).close(), id="sent", marks=pytest.mark.gpu),
        pytest.param(lower_arguments, id="within a process"),
    ],
)
def test_host_state_of_known_objects_is_allowed_in_arguments(lower: Callable[..., Any]) -> None:
    """Such as an averaged model's count; a host tensor next to it is refused, in every role."""
    model = _averaged()
    lower([model], {}, "cuda")
    model.register_buffer("scale", torch.ones(1))
    with pytest.raises(CapabilityError, match="scale is on cpu, but memory is shared on 'cuda' here"):
        lower([model], {}, "cuda")
