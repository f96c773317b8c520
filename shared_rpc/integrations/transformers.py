"""Models of transformers that are attached instead of loaded.

``with shared(): model = AutoModel.from_pretrained(name)`` is the model that ``from_pretrained`` returned in a server, around
the server's memory: all conversions of a checkpoint while it is loaded (renamed, fused, converted, quantised weights) happened
there, once. No constructor runs here, so nothing is copied and nothing can differ.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shared_rpc.client.handle import Lease
from shared_rpc.extras.materialize import Rename, materialize
from shared_rpc.integrations.blocks import Library, Plan, block
from shared_rpc.integrations.keys import Unshareable, digest_of
from shared_rpc.integrations.loading import LoadRequest, library, release, versions_of
from shared_rpc.integrations.models import CLASS_OPTIONS, HUB_OPTIONS, MEMORY_OPTIONS, ModelRequest, call_of, own_model
from shared_rpc.provider.provider import Provider

__all__ = ["from_shared", "release", "shared"]

#: Options about the access to files rather than their content.
_UNCOUNTED = {
    *(*HUB_OPTIONS, *MEMORY_OPTIONS, "use_auth_token", "tqdm_class"),
    *("_from_auto", "_from_pipeline", "_commit_hash", "trust_remote_code", "code_revision"),
}
#: Options of ``from_pretrained`` itself. All others are the configuration's, if it has them.
_OF_LOADING = {
    *("ignore_mismatched_sizes", "weights_only", "quantization_config", "variant", "adapter_kwargs", "adapter_name"),
    *("generation_config", "key_mapping", "dtype", "torch_dtype", "attn_implementation"),
}
#: Options that make a model specific to one process, and why.
_REFUSED = {
    "state_dict": "the weights are this process's",
    "tp_plan": "each process loads only its own part",
    "tp_size": "each process loads only its own part",
    "device_mesh": "each process loads only its own part",
    "distributed_config": "each process loads only its own part",
    "offload_folder": "offloaded weights cannot be shared",
    "offload_buffers": "offloaded weights cannot be shared",
    "use_kernels": "kernels change the process's classes",
    "kernel_config": "kernels change the process's classes",
    "fusion_config": "fusions change the process's classes",
    "gguf_file": "files of GGUF are left to each process",
}
#: Attributes of a configuration that describe its process or its file rather than the model.
_OF_NO_MODEL = {"_name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype", "architectures"}


def shared(provider: Provider | None = None, *, fallback: bool = True) -> AbstractContextManager[None]:
    """Attach instead of loading: ``with shared(): model = AutoModel.from_pretrained(name, …)``.

    In the block, ``from_pretrained`` of every model class of transformers uses a server, which loads each checkpoint once, by
    the same call. The role is that of the environment, as everywhere: in the local role the block has no effect. It applies
    to the code of the block, not to other threads.

    A model is the caller's own: its configuration, hooks, mode, and the tensors that are not parameters. Its parameters are
    shared and read-only, and require no gradients. Those missing in the checkpoint, such as a new head, are its own too.

    :param provider: the provider whose server is used, which must have :func:`~shared_rpc.integrations.loading.serve_with`;
        by default that of :mod:`shared_rpc.integrations.app`.
    :param fallback: True to load unshareable models as without the block, with one warning that gives the reason.
    :raises CapabilityError: by ``from_pretrained`` in the block, for unshareable models, if ``fallback`` is False.
    :raises ConfigurationError: if transformers is not installed; by ``from_pretrained``, if the server has another version.
    """
    return block(provider, fallback, [LIBRARY])


def from_shared(
    source: Lease[Any] | nn.Module | dict[str, torch.Tensor] | Callable[[], Any],
    cls: Any,
    config: Any = None,
    *,
    rename: Rename | None = None,
    own: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Return a model of a class of transformers over shared weights, in evaluation mode.

    The class and the configuration may differ from those of the shared model, as long as the names and shapes of their
    tensors agree. This is :func:`shared_rpc.materialize` around the class's constructor: nothing is converted or copied, and
    any mismatch is an error. (``from_pretrained(None, state_dict=…)`` silently copies tensors whose dtype differs, and always
    some tied tensors.)

    :param source: a handle of a model or of a dict of tensors by name, one of these itself, or a function that returns one.
    :param cls: a model class, or one of the ``Auto`` classes.
    :param config: the configuration; that of the shared model by default.
    :param rename: see :func:`shared_rpc.materialize`.
    :param own: like in :func:`shared_rpc.materialize`.
    :param options: options of the class's ``_from_config``, such as ``attn_implementation``.
    :raises StateMismatchError: if names, shapes or dtypes do not fit, with all of them.
    """
    library("transformers")
    held: Any = source() if not isinstance(source, (Lease, nn.Module)) and callable(source) else source
    value = held.value if isinstance(held, Lease) else held
    config = copy.deepcopy(value.config if config is None else config)
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    tensors = value.state_dict(keep_vars=True) if isinstance(value, nn.Module) else value
    with materialize(held, rename=rename, own=own):
        model = make(config, **options)
        _convert(model, tensors)
    model.eval()
    if (generation := getattr(value, "generation_config", None)) is not None:
        model.generation_config = copy.deepcopy(generation)
    return model


def _convert(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Convert parameters without memory to the dtypes of the tensors that will replace them."""
    floating = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    usual = max(set(floating), key=floating.count, default=torch.get_default_dtype())
    for name, parameter in model.named_parameters():
        dtype = tensors[name].dtype if name in tensors else usual
        if parameter.dtype != dtype and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


# Requests to a server.


def plan(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Plan:
    """Return the server request that replaces ``cls.from_pretrained(*args, **kwargs)``.

    :raises Unshareable: if the result cannot be shared.
    """
    if cls.__module__.partition(".")[0] == "transformers_modules":
        raise Unshareable("trust_remote_code=True: its class is code of the checkpoint")
    if library("transformers.integrations").is_deepspeed_zero3_enabled():
        raise Unshareable("DeepSpeed's ZeRO 3 is on: each process loads only its own part")
    call = call_of(cls, args, kwargs, device, _REFUSED)
    source = call.checkpoint
    if source.is_local and os.path.exists(os.path.join(source.name, source.subfolder, "adapter_config.json")):
        raise Unshareable("its folder has an adapter: load its base, and the adapter by peft")
    options = _with_config(cls, call.name, call.options)
    adapter = dict(options.pop("adapter_kwargs", {}))
    adapter_name = options.pop("adapter_name", "default")
    attention = _take_attention(cls, options)
    dtype = _take_dtype(options)
    given = {name: getattr(cls, name, None) for name in CLASS_OPTIONS}
    versions = versions_of(("transformers", "torch", *_quantisers(options)))
    build = ModelRequest(_key_of, cls, source, call.arguments, {**options, "dtype": dtype}, device, given)

    def finish(parts: dict[str, Any]) -> Any:
        model, info = own_model(parts, call.device_map, device)
        model.name_or_path = model.config._name_or_path = str(call.name)
        if attention is not None:
            model.set_attn_implementation(attention)
        if (adapter_path := adapter.pop("_adapter_model_path", None)) is not None:
            model.load_adapter(adapter_path, adapter_name=adapter_name, adapter_kwargs=adapter)
        return (model, info) if call.wants_info else model

    return Plan(LoadRequest(build.key(versions), versions, build), finish)


def _key_of(build: ModelRequest, versions: dict[str, str]) -> str:
    cls, dtype = build.cls, build.options["dtype"]
    counted_config = {name: value for name, value in build.options["config"].to_dict().items() if name not in _OF_NO_MODEL}
    counted = {key: value for key, value in build.options.items() if key not in (*_UNCOUNTED, "config", "dtype")}
    same = {"cls": cls, "source": build.checkpoint, "dtype": dtype, "arguments": build.arguments, "config": counted_config}
    digest = digest_of(**same, options=counted, given=build.given, versions=versions)
    return f"{cls.__name__} {build.checkpoint.name} {str(dtype).removeprefix('torch.')} {digest}"


def _with_config(cls: Any, name: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a configuration, which is loaded as ``from_pretrained`` does if none is given."""
    config = options.pop("config", None)
    if isinstance(config, library("transformers").PretrainedConfig):
        return {**options, "config": copy.deepcopy(config)}
    of_loading = {key: options.pop(key) for key in (*_OF_LOADING, *(_UNCOUNTED - {*HUB_OPTIONS})) if key in options}
    hub = {key: options.pop(key) for key in HUB_OPTIONS if key in options}
    config, rest = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **hub, **options)
    return {**of_loading, **hub, **rest, "config": config}


def _take_attention(cls: Any, options: dict[str, Any]) -> Any:
    """Pop the implementation of attention from the options, if it can be set on an existing model."""
    config = options["config"]
    if "attn_implementation" in options:
        config._attn_implementation = options.pop("attn_implementation")
    if not cls._can_set_attn_implementation():
        return None
    chosen = _attention_of(config)
    config._attn_implementation = None
    return chosen


def _attention_of(config: Any) -> Any:
    parts = {name: _attention_of(part) for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    chosen = {name: value for name, value in {"": config._attn_implementation, **parts}.items() if value is not None}
    return chosen if len(chosen) > 1 or ("" not in chosen and chosen) else chosen.get("")


def _take_dtype(options: dict[str, Any]) -> Any:
    """Pop the dtype from the options, under either name; without one, return the configuration's."""
    given = options.pop("torch_dtype", None)
    dtype = options.pop("dtype", given)
    if dtype is None or dtype == "auto":
        dtype = getattr(options["config"], "dtype", None) or "auto"
    return getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype


def _quantisers(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the further libraries on which the content of the weights depends."""
    quantised = options.get("quantization_config") or getattr(options["config"], "quantization_config", None)
    return ("torchao", "bitsandbytes", "accelerate") if quantised is not None else ()


LIBRARY = Library(lambda: library("transformers").PreTrainedModel, plan)

if __name__ == "__main__":
    from shared_rpc.integrations.app import provider  # noqa: F401  it serves when this ends
