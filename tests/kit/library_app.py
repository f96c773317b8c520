"""An app whose endpoints return what other people's libraries make: whole pipelines, caches, outputs, and objects of its own.

It is served as a script and imported by tests. Every endpoint has a function of the same name in :data:`LOOK`, which says as
plain data what is to be the same wherever the object is.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from shared_rpc import Provider
from tests.kit.interpreter import bits

DEVICE = os.environ.get("LIBRARY_APP_DEVICE", "cpu")
#: The library that an endpoint needs, for those that need one.
NEEDS = {
    **dict.fromkeys(("pair", "generation", "classification", "output", "cache", "static_cache", "batch"), "transformers"),
    "sentences": "sentence_transformers",
    "diffusion": "diffusers",
}

provider = Provider(device=DEVICE)


def tensors_in(value: Any) -> list[str]:
    """Every bit of all tensors that an object reaches, in the order in which pickle meets them."""
    found: list[str] = []

    class Collector(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> Any:
            """Tensors are noted, and nothing more."""
            if not isinstance(obj, torch.Tensor):
                return None
            found.append(f"{type(obj).__name__} {obj.device.type} {obj.stride()} {obj.requires_grad} {bits(obj)}")
            return len(found)

    Collector(io.BytesIO()).dump(value)
    return found


def described(name: str, value: Any) -> Any:
    """What is to be the same of an endpoint's object, wherever it is."""
    return [type(value).__name__, tensors_in(value), LOOK[name](value)]


# Models.


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[PAD]", "[BOS]", "[EOS]", "the", "a", "cat", "dog", "sat", "ran", "on", "mat", "and", "then"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]"
    )


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(DEVICE).eval()


def _bert(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return getattr(transformers, name)(config).to(DEVICE).eval()


def _tokens() -> torch.Tensor:
    return torch.tensor([[4, 6, 8]], device=DEVICE)


# Endpoints.


@provider.share
def pair() -> Any:
    """A tokenizer and a model."""
    return _tokenizer(), _llama()


@provider.share
def generation() -> Any:
    """A pipeline with its tokenizer."""
    from transformers import pipeline

    return pipeline("text-generation", model=_llama(), tokenizer=_tokenizer(), device=DEVICE)


@provider.share
def classification() -> Any:
    """Another one."""
    from transformers import pipeline

    model = _bert("BertForSequenceClassification")
    return pipeline("text-classification", model=model, tokenizer=_tokenizer(), device=DEVICE)


@provider.share
@torch.no_grad()
def output() -> Any:
    """What a model of transformers gives."""
    return _llama()(_tokens(), use_cache=True, output_hidden_states=True)


@provider.share
@torch.no_grad()
def cache() -> Any:
    """Keys and values, for a decoder that goes on."""
    return _llama()(_tokens(), use_cache=True).past_key_values


@provider.share
@torch.no_grad()
def static_cache() -> Any:
    """The same in memory of a fixed size."""
    from transformers import StaticCache

    model = _llama()
    filled = StaticCache(config=model.config, max_cache_len=16)
    model(_tokens(), past_key_values=filled, use_cache=True)
    return filled


@provider.share
def batch() -> Any:
    """What a tokenizer gives."""
    return _tokenizer()(["the cat sat", "a dog"], return_tensors="pt", padding=True).to(DEVICE)


@provider.share
def sentences() -> Any:
    """A model of sentence-transformers, with all that it needs."""
    from sentence_transformers import SentenceTransformer, models

    with tempfile.TemporaryDirectory() as folder:
        _bert("BertModel").save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        return SentenceTransformer(modules=[models.Transformer(folder), models.Pooling(32)], device=DEVICE)


@provider.share
def diffusion() -> Any:
    """A pipeline of diffusers: a scheduler, and a module that the pipeline itself is not."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=10)).to(DEVICE)


@dataclass
class Scaled:
    """An object of the app's own."""

    weight: torch.Tensor
    function: Any = None

    def apply(self, x: float) -> torch.Tensor:
        """The weight, scaled."""
        return self.weight * x


@provider.share
def dataclass_() -> Any:
    """A dataclass."""
    return Scaled(torch.arange(4.0, device=DEVICE), functools.partial(torch.add, torch.ones(4, device=DEVICE)))


@provider.share
def method() -> Any:
    """A method of an object with a tensor."""
    return Scaled(torch.arange(4.0, device=DEVICE)).apply


@provider.share
def closure() -> Any:
    """A function that closes over one."""
    weight = torch.arange(4.0, device=DEVICE)
    return lambda x: weight * x


@provider.share
def keys() -> Any:
    """A dict with keys of all kinds, and sets."""
    return {
        1: {torch.ones(2, device=DEVICE)},
        (1, None): frozenset([torch.zeros(1, device=DEVICE)]),
        torch.float16: torch.device(DEVICE),
    }


@provider.share
def training() -> Any:
    """A model, and its optimizer with state."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 4, device=DEVICE)).sum().backward()
    optimizer.step()
    return model, optimizer


def _generated(pipe: Any) -> Any:
    return pipe("the cat", max_new_tokens=4, do_sample=False)


def _look_at_training(value: Any) -> Any:
    model, optimizer = value
    tied = optimizer.param_groups[0]["params"][0] is model.weight
    # By number: what the optimizer's own dict has for keys is tensors, which differ from process to process.
    return [tied, optimizer.state_dict()["param_groups"], len(optimizer.state)]


def _picture(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator(DEVICE).manual_seed(0)
    images = pipe(generator=generator, num_inference_steps=2, output_type="np").images
    return [str(pipe.device.type), bits(torch.from_numpy(images)), type(pipe.scheduler).__name__, pipe.unet.training]


LOOK: dict[str, Callable[[Any], Any]] = {
    "pair": lambda v: [
        v[0]("the dog").input_ids,
        v[1].generate(**v[0]("the cat", return_tensors="pt").to(DEVICE), max_new_tokens=4, do_sample=False).tolist(),
    ],
    "generation": lambda v: [_generated(v), v.device.type, v.model.device.type, v.task],
    "classification": lambda v: [v("the cat"), v.device.type],
    "output": lambda v: [list(v.keys()), bits(v.logits), v[0] is v.logits, v.past_key_values.get_seq_length()],
    "cache": lambda v: [v.get_seq_length(), len(v.layers)],
    "static_cache": lambda v: [int(v.get_seq_length()), list(v.layers[0].keys.shape)],
    "batch": lambda v: [v["input_ids"].tolist(), list(v.keys()), v.char_to_token(0, 4)],
    "sentences": lambda v: [bits(v.encode(["the cat sat"], convert_to_tensor=True)), v.device.type],
    "diffusion": _picture,
    "dataclass_": lambda v: [bits(v.apply(2)), bits(v.function(torch.ones(4, device=DEVICE)))],
    "method": lambda v: bits(v(3)),
    "closure": lambda v: bits(v(3)),
    "keys": lambda v: [[repr(key) for key in v], [type(part).__name__ for part in v.values()], v[torch.float16].type],
    "training": _look_at_training,
}
