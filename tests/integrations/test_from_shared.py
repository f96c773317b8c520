"""Models of the caller's class and configuration around weights that are shared already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shared_rpc import Handle, materialize
from shared_rpc.errors import StateMismatchError
from shared_rpc.integrations.transformers import from_shared
from tests.integrations.checkpoints import FAMILIES, decoder, inputs
from tests.integrations.comparing import same_bits, shared_parameters
from tests.kit.world import World

Weights = Callable[[Any], Handle[Any]]


@pytest.fixture
def weights(device: str, world: World) -> Weights:
    """``weights(value)`` returns a client's handle of it."""

    def share(value: Any) -> Handle[Any]:
        world.serve_result(value, managed=True, access="read")
        handle: Handle[Any] = world.client().call("get")
        return handle

    return share


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_built_around_another_ones_weights(family: str, weights: Weights, device: str) -> None:
    """Of the same class, by its own constructor: no parameter is copied, and it computes the same."""
    whole = FAMILIES[family]()
    handle = weights(type(whole)._from_config(whole.config, dtype=torch.bfloat16).to(device).eval())
    with handle:
        source = handle.value
        model = from_shared(handle, type(source))
        assert model is not source
        assert shared_parameters(model) == {name: each.data_ptr() for name, each in source.named_parameters()}
        assert same_bits(source, model)
        assert [tensor.dtype for tensor in model.parameters()] == [tensor.dtype for tensor in source.parameters()]
        with torch.no_grad():
            assert torch.equal(model(**inputs(model))[0], source(**inputs(source))[0])
    if source.can_generate():
        assert model.generation_config is not source.generation_config


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", ["cpu"])
def test_materialize_builds_models_from_their_configuration(device: str, tied: bool) -> None:
    """Around a module, and around a checkpoint without tables and tied names."""
    source = decoder(tie_word_embeddings=tied).eval()
    checkpoint = {name: tensor for name, tensor in source.state_dict().items() if not (tied and name == "lm_head.weight")}
    for tensors in (source, checkpoint):
        with materialize(tensors):
            model = transformers.AutoModelForCausalLM.from_config(source.config)
        weights = (each.model.layers[1].mlp.up_proj.weight for each in (model.eval(), source))
        assert len({weight.data_ptr() for weight in weights}) == 1
        with torch.no_grad():
            assert torch.equal(model(**inputs(model)).logits, source(**inputs(source)).logits)


def test_state_dicts_are_accepted(weights: Weights, device: str) -> None:
    """Without a model, but with a configuration; a function that returns tensors is called."""
    source = decoder().to(device)
    handle = weights(dict(source.state_dict()))
    config = transformers.LlamaConfig(**{**source.config.to_dict(), "attn_implementation": "eager"})
    model = from_shared(lambda: handle, transformers.AutoModelForCausalLM, config)
    assert shared_parameters(model).keys() == dict(model.named_parameters()).keys()
    assert model.config._attn_implementation == "eager"
    assert not model.training


def test_each_parameter_has_its_tensors_dtype(weights: Weights, device: str) -> None:
    """Where ``from_pretrained`` would copy silently."""
    source = decoder().to(device, torch.bfloat16)
    source.model.norm.float()
    handle = weights(source)
    model = from_shared(handle, type(source))
    assert model.model.norm.weight.dtype == torch.float32
    assert len(shared_parameters(model)) == len(list(model.parameters()))


class Head(transformers.LlamaForCausalLM):
    """A user's class, with a part that the weights do not have."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, 1)


def test_other_classes_can_be_used(weights: Weights, device: str) -> None:
    """The new part is the process's own, has the weights' dtype, and can be trained; the rest is shared."""
    handle = weights(decoder().to(device, torch.bfloat16).requires_grad_(False))
    model = from_shared(handle, Head, own=["score.*"])
    own = {name for name, _ in model.named_parameters()} - shared_parameters(model).keys()
    assert own == {"score.weight", "score.bias"} == {name for name, each in model.named_parameters() if each.requires_grad}
    assert model.score.weight.dtype == torch.bfloat16


def test_mismatched_weights_are_refused(weights: Weights, device: str) -> None:
    """The error lists missing names, and other shapes."""
    handle = weights(decoder().to(device))
    with pytest.raises(StateMismatchError) as raised:
        from_shared(handle, Head, transformers.LlamaConfig(**{**handle.value.config.to_dict(), "vocab_size": 90}))
    assert set(raised.value.missing) == {"score.weight", "score.bias"}
    assert {text.split()[0] for text in raised.value.mismatched} == {"model.embed_tokens.weight", "lm_head.weight"}
