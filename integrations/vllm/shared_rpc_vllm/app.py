"""The app of the server, also for ``shared-rpc serve shared_rpc_vllm.app``: one endpoint, for the weights of any model."""

from __future__ import annotations

import os
from typing import Any

import torch

from shared_rpc import Provider
from shared_rpc.memory.devices import torch_device
from shared_rpc_vllm import NotShareable
from shared_rpc_vllm.options import base_path
from shared_rpc_vllm.request import label as label_of

#: The number is the version of request and result, so that an engine does not call a server with another version.
ENDPOINT = "vllm_weights_2"

#: Seconds after which unused weights are dropped; an idle server exits after the same time.
_UNUSED = 3600.0

_is_set = any(os.environ.get(name) for name in ("SHARED_TENSOR_ROLE", "SHARED_TENSOR_ENABLED"))
provider = Provider(
    base_path(),
    execution_mode="auto" if _is_set else "spawn",
    timeout=None,  # loading may take long, and an engine cannot start without the weights
    server_startup_timeout=120.0,
)

if provider.execution_mode == "server":
    # Imports vLLM at the start, concurrently with engines that start at the same time; later workers are forks that have it.
    import shared_rpc_vllm.build  # noqa: F401


@provider.share(
    ENDPOINT,
    managed=True,
    access="read",
    tensors="parameters",  # engines write to other tensors of a model
    concurrency="serialized",  # vLLM has one configuration and one set of groups in a process
    cache_format_key="{label}",
    idle_ttl=_UNUSED,
)
def weights(label: str, request: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load the weights of a request; ``label`` is its cache key, see :func:`shared_rpc_vllm.request.label`.

    :raises NotShareable: if the label does not match the request, because other engines would get these weights.
    """
    if label != label_of(request):
        raise NotShareable(f"the weights of {label_of(request)} were requested as {label}: use the label of the request")
    from shared_rpc_vllm.build import build

    return build(request, torch_device(provider.device_id))
