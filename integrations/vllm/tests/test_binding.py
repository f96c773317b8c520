"""Binding of existing tensors to models on the meta device, with layouts like those of vLLM's models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_rpc_vllm import NotShareable
from shared_rpc_vllm.app import weights
from shared_rpc_vllm.binding import WithoutWeights, bind, refuse_meta, tensors_of
from shared_rpc_vllm.request import label


class Weight(nn.Parameter):
    """A parameter of a custom class with a loader of its layer, like vLLM's."""


class Fused(nn.Module):
    """A layer that fuses several weights of a checkpoint, with a buffer, and another object that refers to its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = Weight(torch.empty(6, 4), requires_grad=False)
        self.qkv.weight_loader = self.load  # type: ignore[attr-defined]
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("table", torch.arange(3))
        self.kernel = Kernel(self.qkv)

    def load(self) -> None:
        """Do nothing, instead of loading."""


class Kernel:
    """An object that computes with a layer's weights, and has its own reference to them."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Model(nn.Module):
    """Two layers, whose embeddings are tied to the head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.layer = Fused()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_model_gets_the_tensors_without_copies() -> None:
    """Under every name; other references to a tensor follow."""
    source = Model()
    nn.init.normal_(source.layer.qkv)
    given = tensors_of(source)
    with WithoutWeights():
        model = Model()
    bind(model, given)
    refuse_meta(model)
    for name, tensor in given.items():
        assert tensors_of(model)[name].data_ptr() == tensor.data_ptr()
    assert model.layer.kernel.weight is model.layer.qkv
    assert torch.equal(model.layer.kernel.weight, source.layer.qkv)


def test_a_model_without_weights_has_computed_tensors() -> None:
    """Such as tables, which constructors may read."""
    with WithoutWeights():
        model = Model()
    assert {name for name, tensor in tensors_of(model).items() if tensor.is_meta} == {
        "layer.qkv", "embed.weight", "head.weight"
    }  # fmt: skip
    assert model.layer.table.tolist() == [0, 1, 2]


def test_a_parameter_that_is_filled_by_the_constructor_is_replaced_too() -> None:
    """Otherwise other references would keep the initial values."""
    source, model = Model(), Model()
    nn.init.ones_(source.layer.qkv)
    nn.init.zeros_(model.layer.qkv)
    bind(model, tensors_of(source))
    assert torch.equal(model.layer.kernel.weight, source.layer.qkv)


def test_a_parameter_keeps_its_class_and_attributes() -> None:
    """vLLM stores loaders there."""
    with WithoutWeights():
        model = Model()
    bind(model, tensors_of(Model()))
    assert type(model.layer.qkv) is Weight
    assert model.layer.qkv.weight_loader == model.layer.load  # type: ignore[attr-defined]


def test_tensors_are_sent_without_references_to_the_model() -> None:
    """A loader refers to the whole model."""
    given = tensors_of(Model())
    assert {type(tensor) for tensor in given.values()} == {nn.Parameter, torch.Tensor}
    assert not any(tensor.__dict__ for tensor in given.values())


@pytest.mark.parametrize("tied_here", [True, False])
def test_ties_are_those_of_the_source(tied_here: bool) -> None:
    """If the loader has tied tensors that this model has not, they share memory too."""
    with WithoutWeights():
        model = Model(tied=tied_here)
    bind(model, tensors_of(Model()))
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_removed_tensors_are_removed_and_added_ones_added() -> None:
    """Processing packs a tensor into one of another shape."""
    source = Model()
    del source.layer._parameters["qkv"]
    source.layer.register_parameter("packed", nn.Parameter(torch.ones(3, 8), requires_grad=False))
    source.embed.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    with WithoutWeights():
        model = Model(tied=False)
    del model.layer.kernel
    bind(model, tensors_of(source))
    refuse_meta(model)
    assert "qkv" not in dict(model.layer.named_parameters())
    assert torch.equal(model.layer.packed, torch.ones(3, 8))  # type: ignore[arg-type]
    assert model.embed.weight.shape == (2, 2)


def test_tensors_are_bound_again_after_they_were_replaced() -> None:
    """vLLM replaces them to reload weights."""
    given = tensors_of(Model())
    with WithoutWeights():
        model, others = Model(), Model()
    bind(model, given)
    model.layer._parameters.update(others.layer._parameters)
    model.layer._buffers.update(others.layer._buffers)
    bind(model, given)
    assert model.layer.qkv.data_ptr() == given["layer.qkv"].data_ptr()
    assert not model.layer.scale.is_meta


def test_a_tensor_of_a_missing_module_is_refused_by_name() -> None:
    """The server has another model."""
    with WithoutWeights():
        model = Model()
    with pytest.raises(NotShareable, match=r"layer\.other\.weight: .* has no module 'layer.other'"):
        bind(model, {"layer.other.weight": torch.ones(1)})


def test_a_buffer_of_another_shape_is_refused_by_name() -> None:
    """An option that determines the shape is missing in the request."""
    with WithoutWeights():
        model = Model()
    with pytest.raises(NotShareable, match=r"layer\.scale is \(2,\) in the server, and \(1,\) in this engine"):
        bind(model, {"layer.scale": torch.ones(2)})


@pytest.mark.parametrize("where", ["attribute", "kernel"])
def test_a_tensor_without_a_value_is_refused_by_name(where: str) -> None:
    """Otherwise it would fail later with an unclear error."""
    with WithoutWeights():
        model = Model()
        if where == "kernel":
            model.layer.kernel.weight = torch.empty(2)
        else:
            model.layer.bias = torch.empty(2)  # type: ignore[assignment]
    bind(model, tensors_of(Model()))
    with pytest.raises(NotShareable, match=rf"layer\.{'kernel.weight' if where == 'kernel' else 'bias'} of Fused"):
        refuse_meta(model)


def test_weights_are_loaded_only_under_the_label_of_their_request() -> None:
    """Otherwise engines with that label would get other weights."""
    asked, other = ({"arguments": {"model": name}, "layout": {}} for name in ("asked", "other"))
    with pytest.raises(NotShareable, match=r"the weights of other .* were requested as asked"):
        weights.__wrapped__(label(asked), other)  # type: ignore[attr-defined]
