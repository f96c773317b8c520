"""A user's own class around shared tensors: assigned by name, without allocations, and complete."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from shared_rpc import materialize
from shared_rpc.errors import CapabilityError, ConfigurationError, StateMismatchError
from tests.kit.comparing import differences
from tests.kit.models import Tied, same_memory
from tests.kit.world import at_once

MIB = 1 << 20


class Rotary(nn.Module):
    """Keeps computed tables, like attention layers: in buffers that are not persistent, and in plain attributes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        frequencies = 1 / 10000 ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(9, device=frequencies.device), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        mask = torch.triu(torch.full((4, 4), float("-inf")), 1)
        mask[0, 0] = 5
        self.kept = {"mask": mask, "pair": (torch.tensor([1.0, 2.0]), "text"), "list": [torch.ones(2)]}


class Block(nn.Module):
    """A layer with parameters, persistent buffers, and tables."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.rotary = Rotary(size)
        self.linear = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.steps = torch.linspace(0, 1, 3).tolist()


class Net(nn.Module):
    """Layers, and an output that is tied to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))


class Owner(nn.Module):
    """Parameters in the order of another library's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"query": nn.Linear(4, 4), "out": nn.Linear(4, 2)}) for _ in range(2))


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and all buffers by name."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def test_a_model_is_built_around_a_modules_tensors() -> None:
    """Every parameter and persistent buffer is the source's memory, by name."""
    source = Net()
    with materialize(source):
        model = Net()
    for name, tensor in source.state_dict(keep_vars=True).items():
        assert same_memory(model.state_dict(keep_vars=True)[name], tensor), name
        assert model.get_parameter(name) is not tensor if isinstance(tensor, nn.Parameter) else True


def test_other_state_comes_from_the_constructor() -> None:
    """Non-persistent buffers, plain attributes and numbers are bit for bit the same as without a source."""
    plain = Net()
    with materialize(plain.state_dict()):
        model = Net()
    for block, expected in zip(model.blocks, plain.blocks, strict=True):
        assert (block.rates, block.steps) == (expected.rates, expected.steps)
        assert differences(expected.rotary, block.rotary) == []
    assert not any(tensor.is_meta for tensor in all_tensors(model).values())


def test_transient_buffers_are_private() -> None:
    """Two engines must not overwrite each other's cache in a non-persistent buffer."""
    source = Rotary(4)
    for tensors in (source, {"cos": source.cos}):  # an older checkpoint may have it
        with materialize(tensors):
            model = Rotary(4)
        model.cos.zero_()
        assert source.cos[0, 0] == 1


@pytest.mark.parametrize(
    "keep",
    [
        lambda it: setattr(it, "kept", [it.weight]),
        lambda it: it.register_buffer("kept", it.weight.detach()[2:], persistent=False),
    ],
    ids=["listed", "view"],
)
def test_attributes_that_use_a_weight_are_refused(keep: Callable[[Any], object]) -> None:
    """They would keep the constructor's memory, so the error names them."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))
            keep(self)

    source = {"weight": torch.ones(4, 3)}
    with pytest.raises(CapabilityError, match=r"kept, of shape .* in forward\(\) or after the block"), materialize(source):
        model = Kept()
    del model


LAYER = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        # Parameters and buffers of these are computed from a weight, and are the source's in the end.
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), (2, 4)),
        (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)),
        # It keeps its weights in a list, in addition to their names.
        (lambda: nn.LSTM(3, 4), (2, 1, 3)),
        # It makes its layers by copying one.
        (lambda: nn.TransformerEncoder(copy.deepcopy(LAYER), 2, enable_nested_tensor=False), (1, 3, 4)),
    ],
    ids=["weight norm", "spectral norm", "recurrent", "copies"],
)
def test_constructors_may_transform_weights(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Their models compute the same as the source."""
    source = make().eval()
    with materialize(source):
        model = make().eval()
    results = [one[0] if isinstance(one, tuple) else one for one in (built(torch.ones(shape)) for built in (model, source))]
    assert torch.equal(*results)


class Asks(nn.Module):
    """Operates on a weight in its constructor."""

    def __init__(self, ask: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        ask(self)


READS = "needs the values of a parameter"


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda it: parametrizations.orthogonal(it.layer), READS),
        (lambda it: it.layer.weight.tolist(), READS),
        (lambda it: torch.zeros(2, 2).copy_(it.layer.weight), READS),
        (lambda it: setattr(it, "norms", {"l": [it.layer.weight.norm()]}), r"norms, of shape \(\), is on the meta device"),
        (lambda it: it.register_buffer("norm", it.layer.weight.norm(), persistent=False), r"norm, .* is on the meta device"),
        (lambda it: setattr(it.layer.weight, "data", torch.ones(2, 2)), r"needs the values of a parameter"),
    ],
)
def test_reading_values_in_the_constructor_is_refused(ask: Callable[[Any], object], expected: str) -> None:
    """There are none, and the error gives the remedy."""
    source = nn.Linear(2, 2)
    kept = []  # an unreferenced module is no model
    with pytest.raises(CapabilityError, match=expected), materialize(source, rename=lambda name: f"layer.{name}"):
        kept.append(Asks(ask))
    assert not nn.Linear(1, 1).weight.is_meta


def test_tied_weights_stay_tied() -> None:
    """One parameter under two names; a source with only one of them, like safetensors files, is enough."""
    source = Tied()
    for tensors in (source, {"embed.weight": source.embed.weight}, {"head.weight": source.embed.weight}):
        with materialize(tensors):
            model = Tied()
        assert model.head.weight is model.embed.weight
        assert same_memory(model.head.weight, source.embed.weight)


def test_tied_weights_with_two_sources_are_refused() -> None:
    """The sources exclude each other."""
    source = {"embed.weight": torch.ones(7, 4), "head.weight": torch.ones(7, 4)}
    expected = r"embed\.weight and head\.weight are one tensor in the model, and two in the source"
    with pytest.raises(StateMismatchError, match=expected), materialize(source):
        model = Tied()
    del model


def test_requires_grad_follows_the_source() -> None:
    """A frozen source gives a frozen model; marks on parameters stay."""
    source = nn.Linear(2, 2)
    source.bias.requires_grad_(False)

    class Marked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.weight.no_decay = True

    with materialize(source):
        model = Marked()
    assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.no_decay
    with materialize(source.state_dict()):
        frozen = nn.Linear(2, 2)
    assert not frozen.weight.requires_grad


# Names.


def test_names_are_mapped_by_a_function() -> None:
    """None leaves a tensor out."""
    source = Owner()
    checkpoint = {
        f"model.layers.{layer}.attn.{part}.{kind}": tensor
        for layer, each in enumerate(source.layers)
        for part, linear in each.items()
        for kind, tensor in linear.named_parameters()
    } | {"model.steps": torch.ones(1)}
    with materialize(checkpoint, rename=lambda name: name.replace("attn.", "")[6:] if "attn" in name else None):
        model = Owner()
    assert same_memory(model.layers[1]["query"].weight, source.layers[1]["query"].weight)
    assert same_memory(model.layers[0]["out"].bias, source.layers[0]["out"].bias)


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (LINEAR, {"rename": lambda name: "bias"}, "'bias' and another name of the source are both 'bias'"),
        (LINEAR, {"own": "lora_*"}, r"own='lora_\*': use a list .* own=\['lora_\*'\]"),
        (3, {}, "the source is a int"),
        ({"a": {"b": torch.ones(1)}}, {}, "use a module, a flat dict"),
        ({"a": torch.ones(1, device="meta")}, {}, "'a' is on the meta device"),
    ],
    ids=["twice", "own", "number", "nested", "meta"],
)
def test_impossible_sources_and_options_are_refused(source: Any, options: dict[str, Any], message: str) -> None:
    """Before anything is built: sources are modules, and flat dicts of tensors that have memory."""
    with pytest.raises(ConfigurationError, match=message), materialize(source, **options):
        raise AssertionError("the block is not entered")


def test_parameters_made_before_the_block_keep_their_values() -> None:
    """If ``own`` names them: no initialiser runs."""
    backbone = nn.Linear(2, 2)
    values = backbone.weight.detach().clone()

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone
            self.head = nn.Linear(2, 2)

    with materialize({f"head.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}, own=["backbone.*"]):
        model = Headed()
    assert torch.equal(model.backbone.weight, values)


def test_blocks_do_not_nest() -> None:
    """The inner one is an error, and afterwards models have memory again."""
    with pytest.raises(ConfigurationError, match="do not nest"), materialize(LINEAR), materialize(LINEAR):
        raise AssertionError("the block is not entered")
    assert not nn.Linear(1, 1).weight.is_meta


def test_all_mismatches_are_reported_at_once() -> None:
    """Missing, unexpected and mismatched names, with both shapes and dtypes, and the model's class."""
    source = {"weight": torch.ones(3, 2), "scale": torch.ones(1), "embed.weight": torch.ones(7, 4, dtype=torch.float16)}

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))
            self.bias = nn.Parameter(torch.ones(2))
            self.embed = nn.Embedding(7, 4)

    with pytest.raises(StateMismatchError) as caught, materialize(source):
        model = Odd()
    error = caught.value
    assert (error.missing, error.unexpected) == (("bias",), ("scale",))
    assert error.mismatched == (
        "weight is (2, 3) float32 in the model, (3, 2) float32 in the source",
        "embed.weight is (7, 4) float32 in the model, (7, 4) float16 in the source",
    )
    text = str(error)
    assert all(
        part in text for part in ("does not fit Odd", "bias", "scale", "rename=", "own=", ".to(dtype)", *error.mismatched)
    )
    del model


def test_own_parameters_are_initialised() -> None:
    """Adapters have the values of their constructor or ``reset_parameters()``, in memory of this process."""

    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.down = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4, 2))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            self.shared.data.fill_(9)
            self.down.data.fill_(2)

    class Adapted(nn.Module):
        def __init__(self, value: float = 3.0) -> None:
            super().__init__()
            self.lora_a = nn.Parameter(torch.full((4, 2), value))
            self.lora_b = Low()
            self.lora_c = nn.Linear(2, 3)
            self.to(torch.bfloat16)

    source = {"lora_b.shared": torch.ones(4).bfloat16()}
    with materialize(source, own=["lora_a", "*.down", "lora_c.*"]):
        model, other = Adapted(), Adapted(1.0)
    assert model.lora_a.requires_grad
    assert (model.lora_a == 3).all() and (other.lora_a == 1).all()
    assert (model.lora_b.down == 2).all()
    assert 0 < model.lora_c.bias.abs().max() < 1
    assert {(type(parameter), parameter.dtype) for parameter in model.parameters()} == {(nn.Parameter, torch.bfloat16)}
    assert same_memory(model.lora_b.shared, source["lora_b.shared"])
    assert (model.lora_b.shared == 1).all()


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: nn.init.normal_(layer.weight),
        lambda layer: setattr(layer, "weight", copy.deepcopy(layer.weight)),
    ],
    ids=["init", "copy"],
)
def test_own_parameters_with_unknown_values_are_refused(write: Callable[[nn.Linear], object]) -> None:
    """Values written after ``reset_parameters()`` would be lost, so the error names the parameter."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            write(self.layer)

    expected = r"layer\.weight of own=.*: do that after the block"
    with pytest.raises(CapabilityError, match=expected), materialize({}, own=["*"]):
        model = Written()
    del model


# Which models.


def test_several_models_use_one_source() -> None:
    """Only names that none of them uses are unexpected. Discarded models do not count, even as parts of cycles."""
    source = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    class Part(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(2, 2))

    with materialize(source):
        discarded = nn.Linear(5, 5)
        discarded.itself = [discarded]
        del discarded
        first, second, again = Part("a"), Part("b"), Part("a")
        loss = nn.CrossEntropyLoss()
    assert same_memory(first.a.weight, source["a"].weight)
    assert same_memory(second.b.weight, source["b"].weight)
    assert same_memory(again.a.weight, first.a.weight)
    assert again.a.weight is not first.a.weight
    del loss


def test_a_block_without_a_model_is_an_error() -> None:
    """Also if its model is not referenced any more."""
    with pytest.raises(ConfigurationError, match="no torch module was built in the block"), materialize(nn.Linear(1, 1)):
        pass


# Leftovers.


def test_parameters_left_without_memory_are_errors() -> None:
    """The error names the owner of a parameter that cannot be replaced."""
    source = nn.Linear(2, 2)
    kept: list[Any] = []
    with pytest.raises(CapabilityError, match=r"has kept weight of Linear.* after the block"), materialize(source):
        model = nn.Linear(2, 2)
        kept.append(torch.optim.SGD(model.parameters()))
    del model


def test_other_threads_are_unaffected() -> None:
    """In the meantime they build models with memory, and other blocks with other sources."""
    sources = [nn.Linear(2, 2) for _ in range(4)]
    barrier = threading.Barrier(5)

    def build(number: int) -> nn.Linear:
        with materialize(sources[number]):
            barrier.wait(20)
            model = nn.Linear(2, 2)
            barrier.wait(20)
        return model

    def build_plain() -> list[nn.Linear]:
        barrier.wait(20)
        models = [nn.Linear(2, 2) for _ in range(100)]
        barrier.wait(20)
        return models

    *built, plain = at_once(*(functools.partial(build, number) for number in range(4)), build_plain)
    assert all(same_memory(model.weight, source.weight) for model, source in zip(built, sources, strict=True))
    assert not any(parameter.is_meta for model in plain for parameter in model.parameters())


# On a GPU.


@pytest.mark.gpu
def test_a_gpu_needs_no_memory() -> None:
    """Around mapped memory of 1 GiB: nothing is left allocated, and only computed results use further memory.

    A constructor that asks for the GPU itself allocates each weight until its registration.
    """
    size = 8192
    with torch.device("cuda"):
        source = {"weight": torch.ones(size, size, 4), "bias": torch.ones(size)}

    class Big(nn.Module):
        def __init__(self, device: str | None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(size, size, 4, device=device))
            self.bias = nn.Parameter(torch.zeros(size, device=device))
            nn.init.normal_(self.weight)
            self.register_buffer("table", torch.arange(4.0, device=device).cos(), persistent=False)

    for device in ("cuda", None):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with materialize(source):
            model = Big(device)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < MIB
        assert torch.cuda.max_memory_allocated() - before < (source["weight"].nbytes if device else 0) + MIB
        assert same_memory(model.weight, source["weight"])
        assert model.table.device == model.weight.device == source["weight"].device
        assert torch.allclose(model.table.cpu(), torch.arange(4.0).cos())
        del model
