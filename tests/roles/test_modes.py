"""Attaching and calling under torch's modes: what comes is what would come without them, and is of use after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_rpc import Provider
from shared_rpc.codec.arguments import decode_arguments, encode_arguments
from shared_rpc.codec.results import decode_result, publish
from shared_rpc.memory.records import Record
from tests.kit.apps import Connect, Serve
from tests.kit.comparing import describe, differences
from tests.kit.subjects import SUBJECTS, quietly


class NoDispatch(TorchDispatchMode):
    """A mode that lets no operation through."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fail."""
        raise AssertionError(f"{function} under a mode")


class NoFunction(TorchFunctionMode):
    """A mode that lets no function through."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fail."""
        raise AssertionError(f"{function} under a mode")


@contextmanager
def default_device() -> Iterator[None]:
    """The meta device for what is made without one."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    """Half precision for what is made without a dtype."""
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    """What is not deterministic raises."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _in(mode: Callable[[], Any]) -> Callable[[Callable[[], Any]], Any]:
    def run(work: Callable[[], Any]) -> Any:
        with mode():
            return work()

    return run


def _transformed(transform: Callable[..., Any]) -> Callable[[Callable[[], Any]], Any]:
    def run(work: Callable[[], Any]) -> Any:
        done = []

        def function(x: torch.Tensor) -> torch.Tensor:
            done.append(work())
            return (x * 2).sum()

        transform(function)(torch.ones(3))
        return done[0]

    return run


MODES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "FakeTensorMode": _in(FakeTensorMode),
    "a dispatch mode": _in(NoDispatch),
    "a function mode": _in(NoFunction),
    "torch.device": _in(lambda: torch.device("meta")),
    "default device": _in(default_device),
    "default dtype": _in(default_dtype),
    "deterministic": _in(deterministic),
    "inference_mode": _in(torch.inference_mode),
    "no_grad": _in(torch.no_grad),
    "vmap": _transformed(torch.vmap),
    "grad": _transformed(torch.func.grad),
    "nested transforms": _transformed(lambda function: torch.vmap(torch.func.grad(function))),
}

#: Values whose rebuilding calls torch in ways of its own.
VALUES = {
    **{name: subject.make for name, subject in SUBJECTS.items() if subject.on == ("cpu", "cuda") and "compiled" not in name},
    "sparse": lambda device: _holding(torch.eye(3, device=device).to_sparse()),
    "quantised": lambda device: _holding(torch.quantize_per_tensor(torch.ones(2, device=device), 0.5, 1, torch.qint8)),
}


#: Modes that any operation of torch's would meet, under which every value is rebuilt; and a few values for the others.
THOROUGH = ("FakeTensorMode", "a dispatch mode", "a function mode", "inference_mode")
SOME = ("sparse", "quantised", "everything", "scaled tensor", "optimiser", "views")


def _holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.table = tensor
    return module


@pytest.mark.filterwarnings("ignore:.*(quantiz|TypedStorage)", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("tensors", ["all", "parameters"])
@pytest.mark.parametrize("mode", MODES)
def test_attaching_under_a_mode(published: Callable[..., Record], device: str, mode: str, tensors: str) -> None:
    """Every value is what it would be without: real, with its dtypes, and no tensor of the mode's; copied ones too."""
    found = {}
    with quietly():
        for name in VALUES if mode in THOROUGH else SOME:
            value = VALUES[name](device)
            expected = describe(value)
            record = published(value, tensors=tensors)
            result = MODES[mode](lambda record=record: decode_result(record.skeleton, record.table, record.segments))
            found[name] = differences(describe(result), expected)
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("tensors", ["all", "parameters"])
@pytest.mark.parametrize("mode", MODES)
def test_publishing_under_a_mode(device: str, no_leaks: None, mode: str, tensors: Any) -> None:
    """Real tensors are moved or copied, large ones too, whatever mode is on where they are returned."""
    value = {"model": nn.Linear(4, 4, device=device), "large": torch.arange(1 << 19, device=device)}
    expected = describe(value)
    with closing(MODES[mode](lambda: publish(value, device, "read_write", "endpoint", tensors=tensors))) as record:
        assert differences(describe(decode_result(record.skeleton, record.table, record.segments)), expected) == []


@pytest.mark.parametrize("mode", MODES)
def test_arguments_under_a_mode(device: str, no_leaks: None, mode: str) -> None:
    """Real tensors are copied, large ones too."""
    value = [nn.Linear(4, 4, device=device), torch.arange(1 << 19, device=device)]
    expected = describe(value)
    with closing(MODES[mode](lambda: encode_arguments(value, {}, device))) as arguments:
        assert differences(describe(decode_arguments(arguments)[0]), expected) == []


@pytest.mark.parametrize("mode", MODES)
def test_calls_under_a_mode(provider: Provider, serve: Serve, connect: Connect, mode: str) -> None:
    """A small result, which comes by a way of its own, is real too."""
    provider.share("double", cache=False)(lambda x: x * 2)
    serve()
    client, x = connect(), torch.arange(4.0)
    for _ in range(2):
        result = MODES[mode](lambda: client.call("double", x))
        assert result.tolist() == [0, 2, 4, 6]
        assert not result.is_inference()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("tensors", ["all", "parameters"])
def test_calls_in_what_torch_compiles(provider: Provider, serve: Serve, connect: Connect, tensors: Any) -> None:
    """A compiled function calls endpoints and attaches models, and computes what it would without being compiled."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    provider.share("load", managed=True, tensors=tensors)(lambda: model)
    provider.share("double", cache=False)(lambda x: x * 2)
    serve()
    client, x = connect(), torch.ones(1, 4)

    def use(x: torch.Tensor) -> torch.Tensor:
        with_model = client.call("load").value(x + 1)
        return client.call("double", with_model.detach()) + 1

    torch._dynamo.reset()
    expected = use(x)
    assert torch.equal(torch.compile(use, backend="eager")(x), expected)
    handle = client.call("load")
    assert torch.equal(torch.compile(handle.value.forward, backend="eager", fullgraph=True)(x), handle.value(x))


def test_a_mode_is_there_again_afterwards(published: Callable[..., Record], device: str) -> None:
    """The thread's modes are as they were, in their order, also where rebuilding fails."""
    seen: list[str] = []

    class Noting(TorchFunctionMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(self.name)
            return function(*args, **(kwargs or {}))

    record = published(torch.ones(2, device=device))
    with Noting("outer"), Noting("inner"), FakeTensorMode():
        decode_result(record.skeleton, record.table, record.segments)
        with pytest.raises(Exception, match="does not fit"):
            decode_result(record.skeleton, record.table, record.segments[:0])
        seen.clear()
        assert isinstance(torch.zeros(1), torch._subclasses.fake_tensor.FakeTensor)
    assert seen[:2] == ["inner", "outer"]
