"""Values of kinds that other programs share: bit for bit the same when attached, under each of torch's modes, and as usable."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from shared_rpc.codec.arguments import decode_arguments, encode_arguments
from shared_rpc.codec.results import decode_result, publish
from shared_rpc.memory.records import Record
from tests.kit.comparing import differences
from tests.kit.modes import MODES
from tests.kit.subjects import SUBJECTS, Subject, quietly


@pytest.fixture
def attached(rebuilt: Callable[..., Any], device: str) -> Callable[[str], Any]:
    """``attached(name)`` is the value of that name as a client gets it, used once before it is published."""

    def attach(name: str) -> Any:
        subject = SUBJECTS[name]
        if device not in subject.on:
            pytest.skip(f"there is none on {device}")
        with quietly():
            value = subject.make(device)
            if subject.use:
                subject.use(value, device)
            return rebuilt(value)

    return attach


@pytest.mark.parametrize("name", SUBJECTS)
def test_values_round_trip(attached: Callable[[str], Any], device: str, name: str) -> None:
    """Class, attributes, strides, ties, flags, hooks and state dict are the same, as are computed results."""
    subject, value = SUBJECTS[name], attached(name)
    assert subject.differences(value, device) == []
    if subject.use:
        with quietly():
            assert differences(subject.use(subject.make(device), device), subject.use(value, device)) == []


@pytest.mark.parametrize("name", [name for name, subject in SUBJECTS.items() if subject.copies])
def test_attached_values_can_be_copied(attached: Callable[[str], Any], name: str) -> None:
    """``copy.deepcopy``, ``pickle`` and ``torch.save`` give equal ones."""

    def saved(value: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    value = attached(name)
    with quietly():
        for copied in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), saved(value)):
            assert differences(value, copied, SUBJECTS[name].ignored) == []


# Under torch's modes.


#: Values whose rebuilding makes unusual calls of torch.
VALUES = {
    **{name: subject for name, subject in SUBJECTS.items() if subject.on == ("cpu", "cuda") and "compiled" not in name},
    "sparse": Subject(lambda device: _holding(torch.eye(3, device=device).to_sparse())),
    "quantised": Subject(lambda device: _holding(torch.quantize_per_tensor(torch.ones(2, device=device), 0.5, 1, torch.qint8))),
}


#: Modes that any operation of torch's would meet, under which every value is rebuilt; and a few values for the others.
THOROUGH = ("FakeTensorMode", "a dispatch mode", "a function mode", "inference_mode")


SOME = ("sparse", "quantised", "everything", "scaled tensor", "optimiser")


def _holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.table = tensor
    return module


@pytest.mark.filterwarnings("ignore:.*(quantiz|TypedStorage)", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("tensors", ["all", "parameters"])
def test_attaching_is_independent_of_modes(published: Callable[..., Record], device: str, tensors: str) -> None:
    """Every value is real, with its own dtype, and no tensor of the mode; copied ones too."""
    found = {}
    with quietly():
        for name, subject in VALUES.items():
            record = published(subject.make(device), tensors=tensors)
            for mode in MODES if name in SOME else THOROUGH:
                result = MODES[mode](lambda record=record: decode_result(record.skeleton, record.table, record.segments))
                found[name, mode] = subject.differences(result, device)
    assert {case: lines for case, lines in found.items() if lines} == {}


@pytest.mark.parametrize("tensors", ["all", "parameters"])
@pytest.mark.parametrize("mode", MODES)
def test_publishing_is_independent_of_modes(device: str, no_leaks: None, mode: str, tensors: Any) -> None:
    """Real tensors are moved or copied, including large ones, with any mode at the endpoint's return."""
    value = {"model": nn.Linear(4, 4, device=device), "large": torch.arange(1 << 19, device=device)}
    own = copy.deepcopy(value)
    with closing(MODES[mode](lambda: publish(value, device, "read_write", "endpoint", tensors=tensors))) as record:
        assert differences(own, decode_result(record.skeleton, record.table, record.segments)) == []


@pytest.mark.parametrize("mode", MODES)
def test_arguments_are_independent_of_modes(device: str, no_leaks: None, mode: str) -> None:
    """Real tensors are copied, including large ones."""
    value = [nn.Linear(4, 4, device=device), torch.arange(1 << 19, device=device)]
    with closing(MODES[mode](lambda: encode_arguments(value, {}, device))) as arguments:
        assert differences(value, decode_arguments(arguments)[0]) == []


def test_modes_are_restored(published: Callable[..., Record], device: str) -> None:
    """In order, even after a failed rebuild."""
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
