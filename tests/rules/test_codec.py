"""Values encoded and rebuilt in one process: the result equals the original, and refusals name the part.

`test_subjects.py` compares all attributes of many kinds of values; here are sharing, and attributes that torch does not keep.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import math
import os
import sys
import threading
import types
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.hooks import RemovableHandle

from shared_rpc.codec import by_value, skeleton
from shared_rpc.codec.arguments import decode_arguments, encode_arguments
from shared_rpc.codec.results import decode_result, publish
from shared_rpc.errors import CapabilityError, CodecError
from shared_rpc.memory.devices import torch_device
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.records import Record
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.records import SegmentInfo
from tests.kit.interpreter import bits
from tests.kit.models import Everything, Labelled, Locked, Marked, State, Tied, same_memory
from tests.kit.subjects import doubled, same_state

Rebuilt = Callable[..., Any]

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    & {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    },
    key=str,
)


# Tensors.


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips(device: str, rebuilt: Rebuilt, dtype: torch.dtype) -> None:
    """Every bit, NaNs included."""
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (6 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    value = data.view(dtype).reshape(2, 3).to(device)
    before = bits(value)
    result = rebuilt(value)
    assert (result.dtype, result.shape, result.device.type) == (dtype, (2, 3), device)
    assert bits(result) == before


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("transpose"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("narrow"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("flip sign"), st.just(0), st.just(0)),
        st.tuples(st.just("conjugate"), st.just(0), st.just(0)),
    ),
    max_size=6,
)


@hypothesis.given(st.lists(st.integers(1, 4), min_size=3, max_size=3), _STEPS)
def test_any_view_round_trips(shape: list[int], steps: list[tuple[str, int, int]]) -> None:
    """It is the same, over the same storage."""
    base = torch.arange(math.prod(shape)).mul(1 + 2j).reshape(shape)
    value = base
    for step, first, second in steps:
        match step:
            case "transpose":
                value = value.transpose(first, second)
            case "narrow":
                start = min(second, value.shape[first] - 1)
                value = value.narrow(first, start, value.shape[first] - start)
            case "step":
                value = value[(*(slice(None),) * first, slice(None, None, second))]
            case "flip sign":
                value = torch._neg_view(value)
            case "conjugate":
                value = value.conj()
    before = (value.stride(), value.is_conj(), value.is_neg(), bits(value))
    with closing(publish([value, base], "cpu", "read_write", "endpoint")) as record:
        view, whole = decode_result(record.skeleton, record.table, record.segments)
    assert (view.stride(), view.is_conj(), view.is_neg(), bits(view)) == before
    assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_overlapping_storages_stay_one_memory(rebuilt: Rebuilt) -> None:
    """Two storages over one array, whose overlap is unknown to torch, still see each other's writes."""
    array = numpy.arange(8, dtype=numpy.float32)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[3:7])
    assert whole.untyped_storage()._cdata != part.untyped_storage()._cdata
    pairs = [(whole, part), rebuilt((whole, part))]
    for number, (one, other) in enumerate(pairs):
        one[3] = 100 + number
        other[3] = 200 + number
        assert [(o[0].item(), w[6].item()) for w, o in pairs] == [(100 + number, 200 + number)] * 2


def test_memory_lives_as_long_as_a_graph_over_it(device: str, rebuilt: Rebuilt) -> None:
    """A graph that saved a shared tensor keeps its memory after the ends of the tensor and the object."""
    layer = nn.Linear(2, 1, bias=False, device=device)
    layer.weight.data.copy_(torch.tensor([[2.0, 3.0]]))
    data = torch.ones(1, 2, device=device, requires_grad=True)
    loss = rebuilt(layer)(data).sum()
    del layer
    gc.collect()
    MAPPINGS.drain()
    loss.backward()
    assert data.grad is not None and data.grad.tolist() == [[2, 3]]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_of_other_classes_round_trip(device: str, rebuilt: Rebuilt, requires_grad: bool) -> None:
    """With their class and attributes, in shared memory; torch's own pickling makes plain ones of them."""
    layer = nn.Linear(2, 2, bias=False, device=device)
    weight = Labelled(torch.arange(4.0, device=device).reshape(2, 2).T, requires_grad)
    weight.label, weight.scale, weight.module, weight.note = "4 bit", torch.ones(1, device=device), layer, [1]
    layer.weight = layer.tied = weight
    theirs = rebuilt(layer)
    assert type(theirs.weight) is Labelled
    assert theirs.weight is theirs.tied
    assert (theirs.weight.label, theirs.weight.note, theirs.weight.requires_grad) == ("4 bit", [1], requires_grad)
    assert theirs.weight.module is theirs
    assert theirs.weight.stride() == (1, 2)
    assert theirs.weight.tolist() == [[0, 2], [1, 3]]
    with torch.no_grad():
        theirs.weight[0, 1] = 9
        theirs.weight.scale.fill_(7)
    assert (weight[0, 1].item(), weight.scale.item()) == (9, 7)


def test_classes_of_remote_code_are_pickled_as_code(
    device: str, published: Callable[..., Record], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers loads a module below ``transformers_modules``, and not that package; a client has neither.

    It gets the module with its file, which ``save_pretrained()`` copies.
    """
    name = "transformers_modules.tiny.0123.modeling"
    remote = types.ModuleType(name)
    exec("import torch\nclass Remote(torch.nn.Linear): pass\ndef twice(x): return 2 * x", vars(remote))
    remote.__file__ = str(tmp_path / "modeling.py")
    assert "transformers_modules" not in sys.modules
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, remote)
        module = remote.Remote(2, 2, device=device)
        module.scale = remote.twice
        record = published(module)
    theirs = decode_result(record.skeleton, record.table, record.segments)
    assert (type(theirs).__module__, type(theirs).__name__, theirs.scale(3)) == (name, "Remote", 6)
    received = sys.modules.pop(name)
    by_value._names.discard(name)
    assert (received.__file__, received.Remote) == (remote.__file__, type(theirs))


# Modules.


def test_tensors_are_found_anywhere(device: str, rebuilt: Rebuilt) -> None:
    """Parameters, buffers, attributes, containers, slots: all are shared, none is pickled, aliases stay aliases."""
    module = Everything(device)
    expected = {where: tensor.tolist() for where, tensor in module.tensors().items()}
    result = rebuilt(module)
    assert {where: tensor.tolist() for where, tensor in result.tensors().items()} == expected
    for where, tensor in module.tensors().items():
        assert same_memory(tensor, result.tensors()[where]), where
    assert result.alias is result.running
    assert list(result.state_dict()) == ["weight", "running"]
    assert result.state.step == 3


def test_empty_containers_of_modules_stay_one_object(device: str, rebuilt: Rebuilt) -> None:
    """Those of a shallow copy, and one to which an attribute refers."""
    module = nn.Linear(2, 2, device=device)
    module.extras = module._buffers
    result, copied = rebuilt([module, copy.copy(module)])
    assert result.extras is result._buffers is copied._buffers
    assert result._forward_hooks is copied._forward_hooks


# Containers.


def test_records_count_each_storage_once(published: Callable[..., Record], device: str) -> None:
    """``nbytes`` is the shared memory, not the sum over names; none of it is in the skeleton."""
    base = torch.zeros(10_000, device=device)
    record = published({"base": base, "view": base[50:], "model": Tied(device)})
    assert record.nbytes == 10_000 * 4 + 7 * 4 * 4
    assert len(record.skeleton) < 4000


@pytest.mark.parametrize(
    ("make", "register", "hooks"),
    [
        (nn.Identity, nn.Module.register_forward_hook, "_forward_hooks"),
        (nn.Identity, nn.Module.register_full_backward_hook, "_backward_hooks"),
        (nn.Identity, nn.Module.register_state_dict_post_hook, "_state_dict_hooks"),
        (lambda: nn.LSTM(2, 2), nn.Module.register_forward_hook, "_forward_hooks"),
    ],
    ids=["forward", "backward", "state_dict", "own pickling"],
)
def test_ids_of_received_hooks_are_not_reused(
    published: Callable[..., Record],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    register: Callable[..., Any],
    hooks: str,
) -> None:
    """A process with fewer registered hooks than the server registers its own next to the received ones."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    value = make().to(device)
    register(value, same_state)
    record = published(value)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    result = decode_result(record.skeleton, record.table, record.segments)
    ids = list(getattr(result, hooks))
    assert len(ids) == len(getattr(value, hooks))
    register(result, doubled)
    assert list(getattr(result, hooks))[:-1] == ids


def test_ids_of_uncounted_hooks_are_not_reused(
    published: Callable[..., Record], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks of a module that the server has unpickled, for example by ``torch.load``, may be above the server's own counter."""
    value = nn.Identity().to(device)
    value.register_forward_hook(same_state)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    record = published(value)
    result = decode_result(record.skeleton, record.table, record.segments)
    result.register_forward_hook(doubled)
    assert list(result._forward_hooks.values()) == [same_state, doubled]


# Refusals: each has the path to the part, and leaves nothing behind.


def test_gpus_are_pickled_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process numbers them differently; a device without a number is the receiver's."""
    monkeypatch.setattr(skeleton, "device_id", {"cuda:1": "GPU-1"}.__getitem__)
    reduce = skeleton._Pickler(io.BytesIO(), skeleton.Scan("cpu")).reducer_override
    assert reduce(torch.device("cuda:1")) == (torch_device, ("GPU-1",))
    assert reduce(torch.device("cuda")) is reduce(torch.device("cpu")) is NotImplemented


def test_standard_output_and_loggers_are_pickled_by_name(
    rebuilt: Rebuilt, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logger has the handlers of the receiving process."""
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    module = nn.Linear(2, 2, device=device)
    module.out, module.log = sys.stdout, logging.getLogger("shared_rpc.tests.codec")
    module.log.addHandler(logging.NullHandler())
    result = rebuilt(module)
    assert (result.out, result.log) == (sys.stdout, module.log)


@pytest.mark.parametrize(
    "value, named",
    [
        (42, "a value of type int without a tensor"),
        ([numpy.zeros(1 << 15)], "Convert arrays (torch.from_numpy)"),
        (State(1), "a value of type tests.kit.models.State"),
    ],
    ids=repr,
)
def test_results_without_memory_are_refused(no_leaks: None, value: Any, named: str) -> None:
    """A value that reaches neither tensor nor module."""
    with pytest.raises(CapabilityError) as caught:
        publish(value, "cpu", "read_write", "load")
    assert named in str(caught.value)
    assert "endpoint 'load' returned" in str(caught.value)


def test_results_of_a_graph_are_refused(no_leaks: None) -> None:
    """The error gives the remedy."""
    value = {"loss": [torch.ones(1, requires_grad=True) * 2]}
    with pytest.raises(CapabilityError) as caught:
        publish(value, "cpu", "read_write", "train")
    assert "endpoint 'train': result['loss'][0] carries an autograd graph (MulBackward0)" in str(caught.value)
    assert "return result['loss'][0].detach()" in str(caught.value)


class Computing:
    """An object with a tensor that has an autograd graph, in a private slot."""

    __slots__ = ("__computed",)

    def __init__(self) -> None:
        self.__computed = torch.ones(1, requires_grad=True) * 2

    def computed(self) -> torch.Tensor:
        """Return that tensor."""
        return self.__computed


class Recomputing:
    """An object whose pickle has no autograd graph: it computes its result when it is made."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.computed = weight, weight * 2

    def __reduce__(self) -> Any:
        return Recomputing, (self.weight,)


@pytest.mark.parametrize(
    "holding",
    [
        lambda computing: computing,
        lambda computing: computing.computed,
        lambda computing: functools.partial(same_state, computing.computed()),
        lambda computing: lambda: computing,
        lambda computing: ValueError(computing.computed()),
        lambda computing: numpy.array([computing], dtype=object),
        lambda computing: iter([computing.computed()]),
    ],
    ids=["private slot", "method", "partial", "closure", "exception", "array", "iterator"],
)
def test_graphs_are_found_wherever_pickling_finds_them(no_leaks: None, holding: Callable[[Computing], Any]) -> None:
    """The error has the path as far as there is one."""
    with pytest.raises(CapabilityError, match=r"endpoint 'train': result\[1\]\S* carries an autograd graph \(MulBackward0\)"):
        publish([torch.ones(1), holding(Computing())], "cpu", "read_write", "train")


def test_unpicklable_parts_that_are_left_out_are_not_mistaken_for_graphs(no_leaks: None) -> None:
    """The path is that of the graph."""
    value = Recomputing(torch.ones(1, requires_grad=True) * 2)
    value.__dict__ = {"lock": threading.Lock(), **value.__dict__}
    with pytest.raises(CapabilityError, match=r"result\.weight carries an autograd graph \(MulBackward0\)"):
        publish(value, "cpu", "read_write", "train")


def test_graphs_that_are_not_pickled_are_no_reason_to_refuse(
    rebuilt: Rebuilt, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a Python module, which is pickled by name, and in what a class leaves out of its pickle."""
    weight = torch.ones(1, device=device, requires_grad=True)
    this = sys.modules[__name__]
    monkeypatch.setattr(this, "computed", weight * 2, raising=False)
    model = nn.Identity()
    model.kept = weight * 2
    _, found, recomputing = rebuilt((model, this, Recomputing(weight)))
    assert found is this
    assert recomputing.computed.requires_grad


# Records that do not fit.


def test_unmappable_segments_are_refused(published: Callable[..., Record], device: str) -> None:
    """And nothing stays mapped."""
    record = published(torch.ones(4, device=device))
    info = SegmentInfo("impostor", record.segments[0].info.nbytes, record.device)
    with closing(Segment.owning(info, os.open(os.devnull, os.O_RDWR))) as segment, pytest.raises(CapabilityError):
        decode_result(record.skeleton, record.table, [segment])


# Arguments.


def test_kinds_of_arguments_round_trip(device: str, no_leaks: None) -> None:
    """Dtypes, scalars and containers; computed tensors as values; subclasses with their attributes."""
    marked = torch.ones(1, device=device).as_subclass(Marked)
    marked.label = "mask"
    computed = torch.ones(1, device=device, requires_grad=True) * 2
    leaf = torch.ones(1, device=device, requires_grad=True)
    sent = [torch.bfloat16, {"n": (1, 2.5, None)}, computed, leaf, marked, torch.eye(2, device=device).to_sparse()]
    with closing(encode_arguments(sent, {}, device)) as arguments:
        dtype, plain, value, asking, subclass, sparse = decode_arguments(arguments)[0]
    assert (dtype, plain) == (torch.bfloat16, {"n": (1, 2.5, None)})
    assert (value.tolist(), value.requires_grad, asking.requires_grad, asking.is_leaf) == ([2], False, True, True)
    assert (type(subclass), subclass.label) == (Marked, "mask")
    assert sparse.to_dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "args, kwargs, text",
    [
        ([Locked()], {}, "argument 0.layers.1.guard['of'][0] cannot be pickled"),
        ([], {"model": {"a": Locked()}}, "argument 'model'['a'].layers.1.guard['of'][0] cannot be pickled"),
        ([torch.ones(1), torch.ones(1, device="meta")], {}, "argument 1 is on the meta device"),
        ([torch.ones(1)], {"x": {1, 2}}, "argument 'x' is a builtins.set"),
        ([[torch.ones(1), numpy.zeros(1)]], {}, "argument 0[1] is a numpy.ndarray"),
    ],
    ids=["module", "nested module", "meta", "set", "array"],
)
def test_arguments_that_cannot_be_sent_are_refused(no_leaks: None, args: list[Any], kwargs: dict[str, Any], text: str) -> None:
    """The error names the argument and the path in it; earlier work is undone."""
    with pytest.raises(CapabilityError) as caught:
        encode_arguments(args, kwargs, "cpu")
    assert text in str(caught.value)


def test_arguments_that_cannot_be_rebuilt_are_refused(device: str, no_leaks: None) -> None:
    """If the server lacks the class, the error says so, and nothing stays mapped."""
    with closing(encode_arguments([nn.Linear(2, 2, device=device)], {}, device)) as arguments:
        arguments.skeletons[0] = arguments.skeletons[0].replace(b"torch.nn.modules.linear", b"torch.nn.modules.absent")
        with pytest.raises(CodecError, match=r"torch\.nn\.modules\.absent"):
            decode_arguments(arguments)
