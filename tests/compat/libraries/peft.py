"""Adapters: on a shared base, in a shared model, merged in a copy."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch

from tests.compat.cases import Case
from tests.compat.modes import repeatable
from tests.kit.comparing import digest

TITLE = "peft"
REQUIRES = ("peft", "transformers")

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tokens(device: str) -> torch.Tensor:
    return torch.tensor([[1, 17, 42, 5], [1, 3, 3, 90]], device=device)


def _gpt2(device: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**_SIZES, max_position_embeddings=32)).to(device).eval()


def _llama(device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, intermediate_size=48, max_position_embeddings=32)).to(device).eval()


def _with_adapter(base: Any, device: str, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    return get_peft_model(base, config).to(device).eval()


def _gpt2_lora(device: str) -> Any:
    return _with_adapter(_gpt2(device), device, target_modules=["c_attn"], fan_in_fan_out=True)


def _llama_lora(device: str) -> Any:
    return _with_adapter(_llama(device), device, target_modules=["q_proj", "v_proj"])


def _llama_dora(device: str) -> Any:
    return _with_adapter(_llama(device), device, target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"])


def _merged_in_place(device: str) -> Any:
    model = _llama_lora(device)
    model.merge_adapter()
    return model


def _merged(device: str) -> Any:
    return _llama_lora(device).merge_and_unload()


def _llama_ia3(device: str) -> Any:
    from peft import IA3Config, get_peft_model

    torch.manual_seed(2)
    targets = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return get_peft_model(_llama(device), IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False, **targets)).eval()


def _run(model: Any, device: str) -> Any:
    return model(input_ids=_tokens(device)).logits


def _private_adapter(attached: Any, own: Any, device: str) -> None:
    """LoRA trained on a shared base: the adapter and its numbers are the client's, the base stays as it is."""
    before = digest(attached)
    found = []
    for base in (attached, own):
        model = _with_adapter(base, device, target_modules=["q_proj", "v_proj"]).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        with repeatable(device):
            for _ in range(3):
                loss = model(input_ids=_tokens(device), labels=_tokens(device)).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            tokens = model.generate(
                input_ids=_tokens(device), attention_mask=torch.ones_like(_tokens(device)), max_new_tokens=3, do_sample=False
            )
        with model.disable_adapter():
            plain = model(input_ids=_tokens(device)).logits
        found.append([loss.detach(), tokens, plain, *(parameter.detach() for parameter in trained)])
        merged = copy.deepcopy(model).merge_and_unload()
        found[-1].append(merged(_tokens(device)).logits)
        model.unload()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert digest(attached) == before


def _merged_copy(attached: Any, own: Any, device: str) -> None:
    """``merge_and_unload`` of a copy gives what it gives of one's own, and leaves the shared weights."""
    before = digest(attached)
    merged = [copy.deepcopy(model).merge_and_unload() for model in (attached, own)]
    assert torch.equal(*(model(_tokens(device)).logits for model in merged))
    assert digest(attached) == before


def _unmerge_copy(attached: Any, own: Any, device: str) -> None:
    """``unmerge_adapter`` of a copy gives what it gives of one's own, and leaves the shared weights merged."""
    before = digest(attached)
    found = []
    for model in (attached, own):
        copied = copy.deepcopy(model)
        copied.unmerge_adapter()
        found.append(_run(copied, device))
    assert torch.equal(*found)
    assert digest(attached) == before


def _second_adapter(attached: Any, own: Any, device: str) -> None:
    """A second adapter in addition to the shared one, switched to and back."""
    from peft import LoraConfig

    found = []
    for model in (attached, own):
        torch.manual_seed(4)
        targets = next(iter(model.peft_config.values())).target_modules
        fan = next(iter(model.peft_config.values())).fan_in_fan_out
        model.add_adapter("other", LoraConfig(r=2, target_modules=targets, fan_in_fan_out=fan, init_lora_weights=False))
        first = _run(model, device)
        model.set_adapter("other")
        second = _run(model, device)
        model.set_adapter("default")
        found.append([first, second, _run(model, device)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][1])


def _save_adapter(attached: Any, own: Any, device: str) -> None:
    """``save_pretrained`` of the adapter, and ``from_pretrained`` of it over a base of one's own."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as folder:
        attached.save_pretrained(folder)
        base = copy.deepcopy(own).unload()
        again = PeftModel.from_pretrained(base, folder).eval()
    assert torch.equal(_run(again, device), _run(own, device))


_ADAPTED = {"merge_and_unload of a copy": _merged_copy, "a second adapter": _second_adapter, "save_pretrained": _save_adapter}

CASES = {
    "Llama, the base": Case(_llama, _run, besides={"an adapter of the client": _private_adapter}),
    "GPT2 with LoRA": Case(_gpt2_lora, _run, compiled=("aot_eager",), besides=_ADAPTED),
    "Llama with LoRA": Case(_llama_lora, _run, besides=_ADAPTED),
    "Llama with LoRA, merged": Case(_merged, _run),
    "Llama with LoRA, merge_adapter()": Case(_merged_in_place, _run, besides={"unmerge_adapter of a copy": _unmerge_copy}),
    "Llama with IA3": Case(_llama_ia3, _run),
    "Llama with DoRA": Case(_llama_dora, _run, besides={"merge_and_unload of a copy": _merged_copy}),
}
