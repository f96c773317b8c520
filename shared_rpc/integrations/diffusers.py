"""Pipelines of diffusers whose models are attached where ordinary code loads them.

``with shared(): pipe = DiffusionPipeline.from_pretrained(name)``: a pipeline loads each of its models by the model's own
``from_pretrained``, and these attach, those of transformers too. The pipeline, its scheduler and its tokenizers are the
process's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from shared_rpc.integrations import transformers
from shared_rpc.integrations.blocks import Library, Plan, block
from shared_rpc.integrations.devices import check_device_map
from shared_rpc.integrations.keys import Unshareable, digest_of, source_of
from shared_rpc.integrations.loading import LoadRequest, library, release, versions_of
from shared_rpc.integrations.models import ModelRequest, own_model
from shared_rpc.provider.provider import Provider

__all__ = ["release", "shared"]

#: Options that say how files are got, and not what is in them.
_UNCOUNTED = {
    *("cache_dir", "force_download", "local_files_only", "proxies", "token", "revision", "subfolder", "disable_mmap"),
    *("low_cpu_mem_usage", "max_memory", "use_flashpack", "flashpack_kwargs", "offload_state_dict"),
}
#: Options that make a model of one process, and why.
_REFUSED = {
    "parallel_config": "each process has a part of its own",
    "offload_folder": "weights that come and go are not shared",
}


def shared(provider: Provider | None = None, *, fallback: bool = True) -> AbstractContextManager[None]:
    """Attach in place of loading: ``with shared(): pipe = DiffusionPipeline.from_pretrained(name, …)``.

    In the block, ``from_pretrained`` of every model class of diffusers and of transformers does what
    :func:`shared_rpc.integrations.transformers.shared` says, with the same parameters. A pipeline's own attaches what it loads.
    """
    return block(provider, fallback, [LIBRARY, transformers.LIBRARY])


def plan(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Plan:
    """Return what to ask a server for in place of ``cls.from_pretrained(*args, **kwargs)``.

    :raises Unshareable: if that cannot be shared.
    """
    name, *arguments = args if args else (kwargs.pop("pretrained_model_name_or_path", None),)
    for option, reason in _REFUSED.items():
        if kwargs.get(option) is not None:
            raise Unshareable(f"{option}={kwargs[option]!r:.200}: {reason}")
    if cls.__module__ == "__main__":
        raise Unshareable(f"its class is of the script, and the server has no such module: put {cls.__name__} into a file")
    device_map = kwargs.pop("device_map", None)
    check_device_map(device_map, device)
    options = {option: value for option, value in kwargs.items() if value is not None}
    wants_info = options.pop("output_loading_info", False)
    checkpoint = source_of(name, options, "config.json")
    if not checkpoint.is_local:
        options["revision"] = checkpoint.content
    build = ModelRequest(_key_of, cls, checkpoint, arguments, options, device, {})

    def finish(parts: dict[str, Any]) -> Any:
        model, info = own_model(parts, device_map, device)
        return (model, info) if wants_info else model

    versions = versions_of(("diffusers", "torch"))
    return Plan(LoadRequest(build.key(versions), versions, build), finish)


def _key_of(build: ModelRequest, versions: dict[str, str]) -> str:
    cls, checkpoint, arguments = build.cls, build.checkpoint, build.arguments
    counted = {option: value for option, value in build.options.items() if option not in _UNCOUNTED}
    digest = digest_of(cls=cls, checkpoint=checkpoint, arguments=arguments, options=counted, versions=versions)
    dtype = str(build.options.get("torch_dtype", "")).removeprefix("torch.")
    return f"{cls.__name__} {checkpoint.name} {dtype} {digest}"


LIBRARY = Library(lambda: library("diffusers").ModelMixin, plan)

if __name__ == "__main__":
    from shared_rpc.integrations.app import provider  # noqa: F401  it serves when this ends
