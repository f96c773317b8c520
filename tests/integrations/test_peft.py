"""Adapters that each process has for itself, over one shared base."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared_rpc import Provider
from shared_rpc.integrations.transformers import shared
from tests.integrations.checkpoints import inputs
from tests.integrations.comparing import shared_parameters
from tests.kit.world import World

peft = pytest.importorskip("peft")
#: Warnings of libraries about their own and each other's next releases.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

CONFIG = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}


def attached(provider: Provider, name: str, **options: Any) -> Any:
    """Load in a block, with an error unless it attaches."""
    with shared(provider, fallback=False):
        return AutoModelForCausalLM.from_pretrained(name, **options)


def adapted(base: Any, seed: int) -> Any:
    """A base with an adapter of random weights."""
    torch.manual_seed(seed)
    return peft.get_peft_model(base, peft.LoraConfig(**CONFIG, init_lora_weights=False))


def test_adapters_are_trained_over_one_base(provider: Provider, checkpoint: str) -> None:
    """Each with its own values, equal to those over a private base, and the base is unchanged."""
    bases = [attached(provider, checkpoint) for _ in range(2)]
    before = {name: tensor.clone() for name, tensor in bases[0].state_dict().items()}
    places = set(shared_parameters(bases[0]).values())
    mine = AutoModelForCausalLM.from_pretrained(checkpoint).to(bases[0].device)
    models = [adapted(base, seed).train() for base, seed in zip((*bases, mine), (1, 2, 1), strict=True)]
    losses = []
    for model in models:
        step = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        for _ in range(2):
            loss = model(**inputs(model), labels=inputs(model)["input_ids"]).loss
            loss.backward()
            step.step()
        losses.append(loss.item())
    assert losses[0] == losses[2] != losses[1]
    assert all(set(shared_parameters(model).values()) == places for model in models[:2])
    again = attached(provider, checkpoint).state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in again.items())


def test_an_adapters_folder_attaches_its_base(provider: Provider, checkpoint: str, tmp_path: Path) -> None:
    """``from_pretrained(adapter)`` and ``PeftModel.from_pretrained(base, adapter)`` compute the same, over one base."""
    saved = adapted(AutoModelForCausalLM.from_pretrained(checkpoint), 3)
    saved.save_pretrained(tmp_path / "adapter")
    base = attached(provider, checkpoint)
    one = attached(provider, str(tmp_path / "adapter"))
    other = peft.PeftModel.from_pretrained(attached(provider, checkpoint), tmp_path / "adapter")
    assert set(shared_parameters(one).values()) == set(shared_parameters(base).values())
    with torch.no_grad():
        expected = saved.to(base.device)(**inputs(base)).logits
        assert torch.equal(one(**inputs(base)).logits, expected)
        assert torch.equal(other(**inputs(base)).logits, expected)


def test_merging_into_copies_keeps_the_base(provider: Provider, checkpoint: str) -> None:
    """``safe_merge`` gives the merged layers memory of the process, and the others stay shared."""
    base = attached(provider, checkpoint)
    model = adapted(base, 4)
    with torch.no_grad():
        expected = model(**inputs(base)).logits
        merged = model.merge_and_unload(safe_merge=True)
        torch.testing.assert_close(merged(**inputs(base)).logits, expected)
    own = {name for name, _ in merged.named_parameters()} - shared_parameters(merged).keys()
    assert own == {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qv"}


def test_a_merge_in_place_ends_its_process_alone(provider: Provider, checkpoint: str, device: str, world: World) -> None:
    """With a message that names the model, and the base is unchanged."""
    base = attached(provider, checkpoint)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    code = f"""if True:
        import peft, transformers
        from shared_rpc import Provider
        from shared_rpc.integrations.transformers import shared
        with shared(Provider(device={device!r}), fallback=False):
            base = transformers.AutoModelForCausalLM.from_pretrained({checkpoint!r})
        model = peft.get_peft_model(base, peft.LoraConfig(**{CONFIG!r}))
        print("merges", flush=True)
        model.merge_and_unload()
        if {device!r} == "cuda":
            base.lm_head.weight.sum().item()
        print("merged", flush=True)
    """
    child = world.start("-c", code, environ={"SHARED_TENSOR_ROLE": "client", "HF_HUB_OFFLINE": "1"})
    child.expect("merges")
    code, text = child.close()
    if device == "cpu":
        assert code == -signal.SIGSEGV
        assert "from_pretrained" in text
    assert code != 0
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
