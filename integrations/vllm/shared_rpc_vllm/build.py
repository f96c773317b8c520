"""The server's part, which loads weights with vLLM's own loader, once for all engines."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from shared_rpc.integrations.keys import Checkpoint, CheckpointChanged
from shared_rpc_vllm import NotShareable
from shared_rpc_vllm.binding import tensors_of
from shared_rpc_vllm.layout import seated
from shared_rpc_vllm.model import process, refuse_methods, warn_of_version
from shared_rpc_vllm.request import deciding_variables, same_release
from shared_rpc_vllm.state import State, recorded


def build(request: Mapping[str, Any], device: torch.device) -> tuple[dict[str, torch.Tensor], State]:
    """Load the weights of a request; return them in the layout of vLLM's kernels, with the state that the kernels need.

    :raises NotShareable: if they cannot be shared; before they are loaded.
    """
    same_release(request["versions"])
    warn_of_version()
    arguments = request["arguments"]
    ranks = request["layout"].get("_WORLD", (0, 1))[1]
    with _variables(request["variables"]), seated(request["layout"], device):
        config = EngineArgs(
            **arguments,
            skip_tokenizer_init=True,
            enforce_eager=True,
            # Starts nothing, but without it vLLM requires as many devices as there are ranks.
            distributed_executor_backend="mp" if ranks > 1 else None,
        ).create_engine_config()
        config.parallel_config.data_parallel_rank = request["layout"].get("_DP", (0, 1))[0]
        with set_current_vllm_config(config):
            _prepare(device)
            found = _loaded(config, device)
    try:
        Checkpoint(*request["checkpoint"]).check()
    except CheckpointChanged as error:
        raise NotShareable(f"{error}: start the engine again") from error
    gc.collect()
    return found


def _loaded(config: Any, device: torch.device) -> tuple[dict[str, torch.Tensor], State]:
    """Load a model; return its tensors and their state."""
    loader, model_config = get_model_loader(config.load_config), config.model_config
    with set_default_torch_dtype(model_config.dtype), device:
        model = loader.create_model(config, model_config)
        refuse_methods(model)
        loader.load_weights(model, model_config)
        with recorded(model) as state:
            process(model, model_config, device, again=False)
    return tensors_of(model), state


def _prepare(device: torch.device) -> None:
    """Initialise the device and the workspace, like a worker of an engine."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with suppress(ImportError):
        from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

        if not is_workspace_manager_initialized():
            init_workspace_manager(device)


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set vLLM's variables to those of the requesting engine, because this process inherited those of another one."""
    before = deciding_variables()
    _set(before, wanted)
    try:
        yield
    finally:
        _set(wanted, before)


def _set(present: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    for name in present:
        os.environ.pop(name, None)
    os.environ.update(wanted)
