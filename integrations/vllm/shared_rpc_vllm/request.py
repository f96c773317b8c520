"""Requests of engines: a description of the weights of one rank, as plain data from which any process can load them."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shared_rpc.integrations.keys import Checkpoint, Unshareable, source_of
from shared_rpc_vllm import NotShareable, __version__

#: Fields of ``ModelConfig`` that do not affect weights. All others are part of the request, including fields of later releases
#: of vLLM: at worst two engines have separate copies.
_NO_WEIGHTS = {
    "allowed_local_media_path", "allowed_media_domains", "disable_cascade_attn", "dtype", "enable_cumem_allocator",
    "enable_nccl_comm_suspend", "enable_prompt_embeds", "enable_return_routed_experts", "enable_sleep_mode",
    "enable_trace_replay", "enforce_eager", "generation_config", "hf_token", "io_processor_plugin", "logits_processors",
    "logprobs_mode", "max_logprobs", "override_generation_config", "pooler_config", "renderer_num_workers",
    "return_sampling_mask", "revision", "seed", "served_model_name", "skip_tokenizer_init", "sleep_mode_backend",
    "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "spec_target_max_model_len", "tokenizer",
    "tokenizer_mode", "tokenizer_revision", "use_fp64_gumbel",
}  # fmt: skip

#: Fields of other parts of a ``VllmConfig`` that affect weights, with their names in ``EngineArgs``; empty if equal.
_ELSEWHERE = {
    "multimodal_config": {"language_model_only": "", "mm_encoder_only": "", "mm_encoder_tp_mode": ""},
    "parallel_config": {
        "tensor_parallel_size": "", "pipeline_parallel_size": "", "prefill_context_parallel_size": "",
        "decode_context_parallel_size": "", "data_parallel_size": "", "enable_expert_parallel": "",
        "expert_placement_strategy": "",
    },
    "cache_config": {"cache_dtype": "kv_cache_dtype", "kv_cache_dtype_skip_layers": ""},
    "kernel_config": {"moe_backend": "", "linear_backend": ""},
    "load_config": {"download_dir": "", "ignore_patterns": ""},
}  # fmt: skip


def request_of(vllm_config: Any, layout: Mapping[str, tuple[int, int]], load_format: str) -> dict[str, Any]:
    """Describe the weights of an engine's rank.

    :param layout: rank and size of each parallel group with more than one process.
    :raises NotShareable: for an option that cannot be described, such as a function.
    """
    from vllm.engine.arg_utils import EngineArgs

    model_config = vllm_config.model_config
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    arguments: dict[str, Any] = {}
    for part, names in {"model_config": _model_fields(model_config), **_ELSEWHERE}.items():
        holder = model_config.multimodal_config if part == "multimodal_config" else getattr(vllm_config, part, None)
        for name, called in names.items():
            value = getattr(holder, name, None)
            if value is not None and (called or name) in known:
                arguments[called or name] = plain(value, f"{part}.{name}")
    for name in ("model", "hf_config_path", "download_dir"):
        # The server may have another working directory.
        if os.path.exists(arguments.get(name, "")):
            arguments[name] = os.path.abspath(arguments[name])
    arguments["dtype"] = str(model_config.dtype).removeprefix("torch.")
    arguments["revision"] = commit_of(model_config.model, model_config.revision)
    arguments["load_format"] = load_format
    if vllm_config.lora_config is not None and getattr(model_config, "is_moe", True):
        # Adapters of experts determine the experts' kernels, and thereby the layout of their weights.
        arguments["enable_lora"] = True
    return {
        "arguments": arguments,
        "checkpoint": list(_checkpoint(arguments["model"], arguments["revision"])),
        "layout": {name: list(seat) for name, seat in sorted(layout.items())},
        "variables": deciding_variables(),
        "versions": _versions(),
    }


def _checkpoint(model: str, commit: str | None) -> Checkpoint:
    if not os.path.exists(model):
        return Checkpoint(model, str(commit))
    try:
        return source_of(model, {}, "config.json")
    except Unshareable as error:
        raise NotShareable(f"{model}: {error}") from error


def commit_of(model: str, revision: str | None) -> str | None:
    """Resolve a revision of a model on the Hugging Face hub to its commit, or return the revision if it is not cached.

    Usually it is cached, because an engine reads the model's configuration before it loads weights.
    """
    if os.path.exists(model):
        return revision
    from huggingface_hub import try_to_load_from_cache

    for name in ("config.json", "params.json"):
        found = try_to_load_from_cache(model, name, revision=revision)
        if isinstance(found, str):  # …/snapshots/<commit>/config.json
            return Path(found).parent.name
    return revision


def _model_fields(model_config: Any) -> dict[str, str]:
    return {field.name: "" for field in dataclasses.fields(model_config) if field.init and field.name not in _NO_WEIGHTS}


def deciding_variables() -> dict[str, str]:
    """Return the set environment variables of vLLM that affect computations, as vLLM declares."""
    from vllm import envs

    # vLLM does not declare these, because compiled code does not depend on them, but the layout of weights does.
    deciding = {*envs.compile_factors(), "VLLM_CPU_MOE_PREPACK", "VLLM_ZENTORCH_WEIGHT_PREPACK"}
    return {name: os.environ[name] for name in sorted(deciding) if name.startswith("VLLM_") and name in os.environ}


def plain(value: Any, name: str) -> Any:
    """Return an option's value as plain data.

    :raises NotShareable: with the name of an option that has no plain value.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value, name)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): plain(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, name) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(inner, name) for inner in value)
    raise NotShareable(f"{name} is {value!r}, which cannot be passed to the server that loads: plain values can")


def label(request: Mapping[str, Any]) -> str:
    """Return a readable name for the weights of a request, with a digest of the request."""
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    rank, size = request["layout"].get("_WORLD", (0, 1))
    return f"{os.path.basename(os.path.normpath(request['arguments']['model']))} {rank + 1}/{size} {digest[:16]}"


def _versions() -> dict[str, str]:
    import vllm

    return {"shared-rpc-vllm": __version__, "vllm": vllm.__version__, "torch": str(torch.__version__)}


def same_release(versions: Mapping[str, str]) -> None:
    """Check that a request comes from the same releases as the server's.

    :raises NotShareable: if not, with a remedy.
    """
    here = _versions()
    others = {name: version for name, version in versions.items() if here.get(name) != version}
    if others:
        differences = "; ".join(f"{name} {here.get(name)}, and this engine {version}" for name, version in others.items())
        raise NotShareable(
            f"the server has {differences}: end it with 'shared-rpc stop' (running engines keep their weights), or set "
            f"another base_path"
        )
