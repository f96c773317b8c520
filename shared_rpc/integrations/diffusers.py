"""Pipelines of diffusers whose models are attached instead of loaded.

``with shared(): pipe = DiffusionPipeline.from_pretrained(name)``: a pipeline loads each of its models by the model's own
``from_pretrained``, which attaches, including models of transformers. The pipeline, its scheduler and its tokenizers are the
process's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from shared_rpc.integrations import transformers
from shared_rpc.integrations.blocks import Library, Plan, block
from shared_rpc.integrations.keys import digest_of
from shared_rpc.integrations.loading import LoadRequest, library, release, versions_of
from shared_rpc.integrations.models import HUB_OPTIONS, MEMORY_OPTIONS, ModelRequest, call_of, own_model
from shared_rpc.provider.provider import Provider

__all__ = ["release", "shared"]

#: Options about the access to files rather than their content.
_UNCOUNTED = {*HUB_OPTIONS, *MEMORY_OPTIONS, "use_flashpack", "flashpack_kwargs"}
#: Options that make a model specific to one process, and why.
_REFUSED = {
    "parallel_config": "each process loads only its own part",
    "offload_folder": "offloaded weights cannot be shared",
}


def shared(provider: Provider | None = None, *, fallback: bool = True) -> AbstractContextManager[None]:
    """Attach instead of loading: ``with shared(): pipe = DiffusionPipeline.from_pretrained(name, …)``.

    In the block, ``from_pretrained`` of every model class of diffusers and of transformers behaves as described in
    :func:`shared_rpc.integrations.transformers.shared`, with the same parameters. A pipeline's own attaches its models.
    """
    return block(provider, fallback, [LIBRARY, transformers.LIBRARY])


def plan(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Plan:
    """Return the server request that replaces ``cls.from_pretrained(*args, **kwargs)``.

    :raises Unshareable: if the result cannot be shared.
    """
    call = call_of(cls, args, kwargs, device, _REFUSED)
    build = ModelRequest(_key_of, cls, call.checkpoint, call.arguments, call.options, device, {})

    def finish(parts: dict[str, Any]) -> Any:
        model, info = own_model(parts, call.device_map, device)
        return (model, info) if call.wants_info else model

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
