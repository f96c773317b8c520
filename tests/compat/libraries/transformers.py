"""Models of transformers with random weights, caches, outputs, and a whole pipeline."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.compat.cases import Case
from tests.compat.modes import repeatable

TITLE = "transformers"
REQUIRES = ("transformers", "tokenizers")

_TEXT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_VISION = {**{name: value for name, value in _TEXT.items() if name != "vocab_size"}, "image_size": 16, "patch_size": 8}
#: Of models of texts and pictures.
_BESIDE_VISION = {**_TEXT, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
_CAUSAL = {**_TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}


def _tokens(device: str) -> torch.Tensor:
    return torch.tensor([[1, 17, 42, 5], [1, 3, 3, 90]], device=device)


def _model(model_class: str, config_class: str, **options: Any) -> Callable[[str], Any]:
    def build(device: str) -> Any:
        import transformers

        config = getattr(transformers, config_class)(**options)
        return getattr(transformers, model_class)(config).to(device).eval()

    return build


def causal(model_class: str, config_class: str, **options: Any) -> Callable[[str], Any]:
    """What builds a small language model of a class, on a device."""
    return _model(model_class, config_class, **{**_CAUSAL, "pad_token_id": 0, **options})


_bert = _model("BertForMaskedLM", "BertConfig", **_TEXT)


def _generate(model: Any, device: str) -> Any:
    tokens = _tokens(device)
    mask = torch.ones_like(tokens)
    made = [model(tokens).logits]
    # On a GPU a model with a static cache is compiled by generate(), for a minute each; the check of compiling does without.
    options = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True}
    with torch.no_grad():
        for cache in ("dynamic", "static"):
            made.append(model.generate(tokens, attention_mask=mask, cache_implementation=cache, **options))
    return made


def _logits(model: Any, device: str) -> Any:
    return model(_tokens(device)).logits


def _generate_dynamic(model: Any, device: str) -> Any:
    tokens = _tokens(device)
    with torch.no_grad():
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    return [model(tokens).logits, made]


def _run_t5(model: Any, device: str) -> Any:
    tokens = _tokens(device)
    with torch.no_grad():
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    return [model(input_ids=tokens, decoder_input_ids=tokens).logits, made]


def _run_whisper(model: Any, device: str) -> Any:
    sound = torch.linspace(-1, 1, 2 * 8 * 32, device=device).reshape(2, 8, 32).to(next(model.parameters()).dtype)
    return model(input_features=sound, decoder_input_ids=_tokens(device)).logits


def _picture(model: Any, device: str, size: int = 16) -> torch.Tensor:
    picture = torch.linspace(-1, 1, 2 * 3 * size * size, device=device).reshape(2, 3, size, size)
    return picture.to(next(model.parameters()).dtype)


def _run_clip(model: Any, device: str) -> Any:
    made = model(input_ids=_tokens(device), pixel_values=_picture(model, device))
    return [made.logits_per_text, made.text_embeds, made.image_embeds]


def tokenizer() -> Any:
    """A tokenizer of words, made in memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


def _pipeline(device: str) -> Any:
    from transformers import pipeline

    model = causal("LlamaForCausalLM", "LlamaConfig")(device)
    return pipeline("text-generation", model=model, tokenizer=tokenizer(), device=device)


def _run_pipeline(made: Any, device: str) -> Any:
    texts = [made(text, max_new_tokens=4, do_sample=False)[0]["generated_text"] for text in ("the quick", "a lazy dog")]
    return [torch.tensor(list("|".join(texts).encode()))]


def _output(device: str) -> Any:
    with torch.no_grad():
        return causal("LlamaForCausalLM", "LlamaConfig")(device)(_tokens(device), output_hidden_states=True)


def _dynamic_cache(device: str) -> Any:
    with torch.no_grad():
        return causal("LlamaForCausalLM", "LlamaConfig")(device)(_tokens(device), use_cache=True).past_key_values


def _static_cache(device: str) -> Any:
    from transformers import StaticCache

    model = causal("LlamaForCausalLM", "LlamaConfig")(device)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(_tokens(device), past_key_values=cache)
    return cache


def _continue(cache: Any, device: str) -> Any:
    torch.manual_seed(0)
    model = causal("LlamaForCausalLM", "LlamaConfig")(device)
    with torch.no_grad():
        return model(_tokens(device)[:, -1:], past_key_values=copy.deepcopy(cache)).logits


def _encoding(device: str) -> Any:
    return tokenizer()(["the quick fox", "a dog"], padding=True, return_tensors="pt").to(device)


def _prepared_for_training(device: str) -> Any:
    model = causal("LlamaForCausalLM", "LlamaConfig")(device)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model


_REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class TinyConfig(PretrainedConfig):
    model_type = "tiny-remote"

    def __init__(self, width=8, **options):
        self.width = width
        super().__init__(**options)


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.width, config.width)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
"""


def _remote_code(device: str) -> Any:
    from transformers import AutoConfig, AutoModel

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "tiny_remote")
        checkpoint.mkdir()
        checkpoint.joinpath("modeling.py").write_text(_REMOTE)
        checkpoint.joinpath("config.json").write_text(
            '{"model_type": "tiny-remote", "width": 8,'
            ' "auto_map": {"AutoConfig": "modeling.TinyConfig", "AutoModel": "modeling.TinyModel"}}'
        )
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
        torch.manual_seed(0)
        return AutoModel.from_config(config, trust_remote_code=True).to(device).eval()


def _run_remote_code(model: Any, device: str) -> Any:
    return model(torch.linspace(0, 1, 8, device=device).expand(2, 8).to(model.layer.weight.dtype))


def _save_pretrained(attached: Any, own: Any, device: str) -> None:
    """``save_pretrained`` in the client, and ``from_pretrained`` of that, gives the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        attached.save_pretrained(folder)
        again = type(own).from_pretrained(folder)
    for (name, saved), original in zip(again.state_dict().items(), own.state_dict().values(), strict=True):
        assert torch.equal(saved.cpu(), original.cpu()), name


def _save_remote_code(attached: Any, own: Any, device: str) -> None:
    """``save_pretrained`` of a class that came as code."""
    with tempfile.TemporaryDirectory() as folder:
        attached.save_pretrained(folder)
        assert Path(folder, "model.safetensors").exists()


def _resize(attached: Any, own: Any, device: str) -> None:
    """New tokens in a copy, and LoRA-free training of the embeddings alone, do what they do to a model of one's own."""
    mine, other = copy.deepcopy(attached), copy.deepcopy(own)
    for model in (mine, other):
        torch.manual_seed(1)
        model.resize_token_embeddings(104, mean_resizing=False)
    assert torch.equal(mine(_tokens(device)).logits, other(_tokens(device)).logits)


def _sample(attached: Any, own: Any, device: str) -> None:
    """Sampling and beams."""
    tokens = _tokens(device)
    for options in ({"do_sample": True, "top_k": 5}, {"num_beams": 3, "do_sample": False}):
        made = []
        for model in (attached, own):
            torch.manual_seed(1)
            made.append(model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, **options))
        assert torch.equal(*made), options


def _train_checkpointed(attached: Any, own: Any, device: str) -> None:
    """A backward pass with gradient checkpointing and the hook on the embeddings."""
    grads = []
    for model in (attached, own):
        model.train()
        with repeatable(device):
            model(_tokens(device), labels=_tokens(device)).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
        model.eval()
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def _llava(device: str) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_VISION),
        text_config=LlamaConfig(**_CAUSAL),
        image_token_id=95,
    )
    return LlavaForConditionalGeneration(config).to(device).eval()


def _run_llava(model: Any, device: str) -> Any:
    tokens = torch.tensor([[1, 95, 95, 95, 95, 7], [1, 95, 95, 95, 95, 9]], device=device)
    return model(input_ids=tokens, pixel_values=_picture(model, device)).logits


_SAVED = {"save_pretrained": _save_pretrained}

CASES = {
    "Llama": Case(
        causal("LlamaForCausalLM", "LlamaConfig"),
        _generate,
        compiled=("aot_eager",),
        besides={**_SAVED, "sampling and beams": _sample, "resize_token_embeddings of a copy": _resize},
    ),
    "Llama, tied": Case(causal("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True), _generate_dynamic, besides=_SAVED),
    "Llama, parameters alone": Case(
        causal("LlamaForCausalLM", "LlamaConfig"), _generate_dynamic, parameters_alone=True, besides=_SAVED
    ),
    "Qwen2": Case(causal("Qwen2ForCausalLM", "Qwen2Config"), _generate_dynamic),
    "Qwen3": Case(causal("Qwen3ForCausalLM", "Qwen3Config", head_dim=8), _generate_dynamic),
    "Mixtral": Case(
        causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2), _generate_dynamic
    ),
    "DeepSeek-V3": Case(
        causal(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            num_key_value_heads=4,
        ),
        _generate_dynamic,
    ),
    "Gemma 3": Case(causal("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8), _generate_dynamic),
    "Mistral": Case(causal("MistralForCausalLM", "MistralConfig"), _generate_dynamic),
    "Phi-3": Case(causal("Phi3ForCausalLM", "Phi3Config"), _generate_dynamic),
    "GPT2": Case(causal("GPT2LMHeadModel", "GPT2Config"), _generate_dynamic, besides=_SAVED),
    "Mamba": Case(
        _model(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            bos_token_id=1,
            eos_token_id=2,
        ),
        _generate_dynamic,
    ),
    "BERT": Case(_bert, _logits, besides=_SAVED),
    "T5": Case(
        _model(
            "T5ForConditionalGeneration",
            "T5Config",
            **{"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
            decoder_start_token_id=0,
        ),
        _run_t5,
        besides=_SAVED,
    ),
    "Whisper": Case(
        _model(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **{"vocab_size": 96, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
            **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
            **{"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
        ),
        _run_whisper,
    ),
    "ViT": Case(
        _model("ViTForImageClassification", "ViTConfig", **_VISION), lambda model, device: model(_picture(model, device)).logits
    ),
    "CLIP": Case(
        _model("CLIPModel", "CLIPConfig", text_config=_BESIDE_VISION, vision_config=_VISION, projection_dim=16), _run_clip
    ),
    "SigLIP": Case(
        _model("SiglipModel", "SiglipConfig", text_config={**_BESIDE_VISION, "pad_token_id": 0}, vision_config=_VISION),
        _run_clip,
    ),
    "LLaVA": Case(_llava, _run_llava),
    "prepared for training": Case(
        _prepared_for_training,
        _logits,
        besides={"training with checkpoints": _train_checkpointed},
    ),
    "remote code": Case(
        _remote_code,
        _run_remote_code,
        besides={"save_pretrained": _save_remote_code},
        ignored="name_or_path|auto_map",
        excused=dict.fromkeys(
            ("pickle", "torch.save"), "the visitor loads the code itself, and has two classes of that name: pickle finds one"
        ),
    ),
    "text-generation pipeline": Case(_pipeline, _run_pipeline, remembers=True),
    "ModelOutput": Case(_output),
    "DynamicCache": Case(_dynamic_cache, _continue),
    "StaticCache": Case(_static_cache, _continue),
    "BatchEncoding": Case(_encoding, as_pickled=True),
}
