"""Weights that a server quantises while it loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shared_rpc import Provider
from shared_rpc.integrations.transformers import shared
from shared_rpc.memory.mapping import MAPPINGS
from tests.integrations.checkpoints import decoder, inputs, save

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def int8_of_torchao() -> Any:
    """Weights of 8 bits, as a subclass of tensors."""
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())


def bits_of_bitsandbytes(bits: int) -> Any:
    """Weights of 8 or 4 bits, as a class of parameters."""
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})


def inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the inner tensors of a tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in inner(getattr(tensor, name))]


def places(model: nn.Module) -> list[int]:
    """Return the addresses of all parameters, whose memory must be mapped for reading."""
    found = [part.data_ptr() for parameter in model.parameters() for part in inner(parameter)]
    mapped = [MAPPINGS.find(address) for address in found]
    assert all(place is not None and place[0].info.access == "read" for place in mapped)
    return found


@pytest.mark.parametrize("quantised", ["torchao int8", "bitsandbytes int8", "bitsandbytes nf4"])
def test_quantised_weights_are_attached(quantised: str, provider: Provider, tmp_path: Path) -> None:
    """They are quantised once, stay in the server's memory, and compute like a private model's."""
    config = int8_of_torchao() if quantised.startswith("torchao") else bits_of_bitsandbytes(8 if "8" in quantised else 4)
    name = save(decoder(hidden_size=64, intermediate_size=128), tmp_path / "llama")
    loader, options = transformers.AutoModelForCausalLM, {"quantization_config": config, "dtype": torch.bfloat16}
    with shared(provider, fallback=False):
        one, other = (loader.from_pretrained(name, **options) for _ in range(2))
        plain = loader.from_pretrained(name, dtype=torch.bfloat16)
    assert places(one) == places(other)
    assert places(one) != places(plain)
    where = {"device_map": provider_device(provider)} if provider.device != "cpu" else {}
    mine = loader.from_pretrained(name, **options, **where)
    with torch.no_grad():
        assert torch.equal(mine(**inputs(mine)).logits, one(**inputs(one)).logits)


def provider_device(provider: Provider) -> str:
    """The device of a provider's results."""
    return "cpu" if provider.device == "cpu" else "cuda:0"
