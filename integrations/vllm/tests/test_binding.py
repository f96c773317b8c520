"""Binding: models from the meta device around tensors that are there, as vLLM's models are laid out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_rpc_vllm.app import weights
from shared_rpc_vllm.binding import WithoutWeights, bind, refuse_meta, tensors_of
from shared_rpc_vllm.errors import NotShareable
from shared_rpc_vllm.request import label


class Weight(nn.Parameter):
    """A parameter of a class of its own, as vLLM's are, with a loader of the layer that has it."""


class Fused(nn.Module):
    """A layer that has several of a checkpoint in one, with a buffer, and another object that refers to its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = Weight(torch.empty(6, 4), requires_grad=False)
        self.qkv.weight_loader = self.load  # type: ignore[attr-defined]
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("table", torch.arange(3))
        self.kernel = Kernel(self.qkv)

    def load(self) -> None:
        """Stand for a loader."""


class Kernel:
    """What computes with a layer's weights, and has a reference to them of its own."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Model(nn.Module):
    """Two layers, of which the embeddings are those of the head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.layer = Fused()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_model_has_the_tensors_and_copies_none() -> None:
    """By every name; what refers to one has it too."""
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


def test_a_model_without_weights_has_what_is_computed() -> None:
    """Such as tables: code that makes a model may look at them at once."""
    with WithoutWeights():
        model = Model()
    assert {name for name, tensor in tensors_of(model).items() if tensor.is_meta} == {
        "layer.qkv", "embed.weight", "head.weight"
    }  # fmt: skip
    assert model.layer.table.tolist() == [0, 1, 2]


def test_a_parameter_that_is_filled_when_it_is_made_becomes_the_given_one_too() -> None:
    """What refers to it would go on with what it was filled with."""
    source, model = Model(), Model()
    nn.init.ones_(source.layer.qkv)
    nn.init.zeros_(model.layer.qkv)
    bind(model, tensors_of(source))
    assert torch.equal(model.layer.kernel.weight, source.layer.qkv)


def test_a_parameter_stays_of_its_class_with_its_attributes() -> None:
    """vLLM finds loaders there."""
    with WithoutWeights():
        model = Model()
    bind(model, tensors_of(Model()))
    assert type(model.layer.qkv) is Weight
    assert model.layer.qkv.weight_loader == model.layer.load  # type: ignore[attr-defined]


def test_tensors_go_without_what_refers_to_the_model() -> None:
    """A loader would take the whole model along."""
    given = tensors_of(Model())
    assert {type(tensor) for tensor in given.values()} == {nn.Parameter, torch.Tensor}
    assert not any(tensor.__dict__ for tensor in given.values())


@pytest.mark.parametrize("tied_here", [True, False])
def test_ties_are_those_of_the_source(tied_here: bool) -> None:
    """Where the loader has tied what this model has not, there is one memory for both."""
    with WithoutWeights():
        model = Model(tied=tied_here)
    bind(model, tensors_of(Model()))
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_what_the_source_has_no_more_goes_and_what_it_has_gained_comes() -> None:
    """Processing packs one tensor into another, of another shape."""
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


def test_tensors_are_bound_again_after_others_were_put_in_their_place() -> None:
    """As vLLM does to load weights anew."""
    given = tensors_of(Model())
    with WithoutWeights():
        model, others = Model(), Model()
    bind(model, given)
    model.layer._parameters.update(others.layer._parameters)
    model.layer._buffers.update(others.layer._buffers)
    bind(model, given)
    assert model.layer.qkv.data_ptr() == given["layer.qkv"].data_ptr()
    assert not model.layer.scale.is_meta


def test_a_tensor_of_a_module_that_there_is_not_is_refused_by_name() -> None:
    """The server's model is another one."""
    with WithoutWeights():
        model = Model()
    with pytest.raises(NotShareable, match=r"layer\.other\.weight: .* has no module 'layer.other'"):
        bind(model, {"layer.other.weight": torch.ones(1)})


def test_a_buffer_of_another_shape_is_refused_by_name() -> None:
    """An option that decides about it is not among those that the weights are known by."""
    with WithoutWeights():
        model = Model()
    with pytest.raises(NotShareable, match=r"layer\.scale is \(2,\) in the server, and \(1,\) in this engine"):
        bind(model, {"layer.scale": torch.ones(2)})


@pytest.mark.parametrize("where", ["attribute", "kernel"])
def test_a_tensor_that_is_left_without_a_value_is_refused_by_name(where: str) -> None:
    """It would be read later, where nothing says why it cannot be."""
    with WithoutWeights():
        model = Model()
        if where == "kernel":
            model.layer.kernel.weight = torch.empty(2)
        else:
            model.layer.bias = torch.empty(2)  # type: ignore[assignment]
    bind(model, tensors_of(Model()))
    with pytest.raises(NotShareable, match=rf"layer\.{'kernel.weight' if where == 'kernel' else 'bias'} of Fused"):
        refuse_meta(model)


def test_weights_are_loaded_under_the_label_of_their_request_alone() -> None:
    """An engine that asks for others by that label would give them to all who ask for these."""
    asked, other = ({"arguments": {"model": name}, "layout": {}} for name in ("asked", "other"))
    with pytest.raises(NotShareable, match=r"the weights of other .* were requested as asked"):
        weights.__wrapped__(label(asked), other)  # type: ignore[attr-defined]
