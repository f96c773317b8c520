"""Models of vLLM: checks whether they can be shared, and post-load processing of their weights, in engines and the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import vllm
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

from shared_rpc_vllm import LOAD_FORMAT, NotShareable

_log = init_logger(f"vllm.{__name__}")

#: Tested releases of vLLM.
_TESTED = ("0.32.",)


def warn_of_version() -> None:
    """Warn once about an untested release of vLLM. Features are detected independently of the release."""
    if not vllm.__version__.startswith(_TESTED):
        tested = ", ".join(f"{version}*" for version in _TESTED)
        _log.warning_once("--load-format shared_rpc is tested with vLLM %s; this is %s", tested, vllm.__version__)


#: Options with which weights change or move, and their paths in an engine's configuration.
_REFUSED = {
    "--enable-eplb: experts move between the ranks": "parallel_config.enable_eplb",
    "--enable-elastic-ep: experts move between the ranks": "parallel_config.enable_elastic_ep",
    "--sleep-preserve-parameter-names: an engine would write to its weights when it wakes": (
        "model_config.sleep_preserve_parameter_names"
    ),
    "--cpu-offload-gb: weights move between devices": "offload_config.uva.cpu_offload_gb",
    "--offload-group-size: weights move between devices": "offload_config.prefetch.offload_group_size",
    "a device of their own (load_config.device): they are where the server has them": "load_config.device",
}


def refuse_engine(vllm_config: Any, model_config: Any) -> None:
    """Refuse options with which an engine would write to its weights, or needs them on a certain device.

    :raises NotShareable: with the name of the option.
    """
    for reason, path in _REFUSED.items():
        found = vllm_config
        for name in path.split("."):
            found = getattr(found, name, None)
        if found:
            raise NotShareable(f"the weights cannot be shared with {reason}")
    _refuse_sleep_mode(vllm_config.model_config)
    if model_config is not vllm_config.model_config:
        raise NotShareable(
            "the weights of a draft model cannot be shared: set its own loader in speculative_config, "
            "'draft_load_config': {'load_format': 'auto'}"
        )


def _refuse_sleep_mode(model_config: Any) -> None:
    """Refuse sleep modes with which an engine would free the weights of all engines.

    :raises NotShareable: for another backend that the user has chosen, and for a vLLM without a choice of backends.
    """
    if getattr(model_config, "enable_sleep_mode", False):
        backend = getattr(model_config, "sleep_mode_backend", None)
        if backend is None:
            raise NotShareable(f"the weights cannot be shared with --enable-sleep-mode of vLLM {vllm.__version__}: use 0.32")
        if backend not in ("cumem", LOAD_FORMAT):
            raise NotShareable(f"the weights cannot be shared with the sleep-mode backend {backend!r}: use {LOAD_FORMAT!r}")


def choose_sleep_mode(model_config: Any) -> None:
    """Select our sleep-mode backend for an engine with shared weights; vLLM reads the name at the first sleep."""
    if getattr(model_config, "sleep_mode_backend", None) is not None:
        model_config.sleep_mode_backend = LOAD_FORMAT
        if getattr(model_config, "sleep_mode_offload_cudagraph", False):
            # vLLM compares the name with that of its own backend when it captures graphs.
            _log.warning_once("--sleep-mode-offload-cudagraph has no effect with shared weights: CUDA graphs stay in memory")


def refuse_methods(model: nn.Module) -> None:
    """Refuse models with layers whose weights each engine must process itself.

    :raises NotShareable: with the name of the first such layer and of its method.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not _is_shareable(method):
            raise NotShareable(
                f"{name or 'the model'} is of {type(method).__name__}, whose weights each engine processes for itself on "
                f"{current_platform.device_name}"
            )


#: Methods for unquantised weights. On a CPU, vLLM passes weights of the first two to oneDNN, which packs them into private
#: memory (dispatch_cpu_unquantized_gemm, 0.11 to 0.32).
_PACKED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_PLAIN = (*_PACKED, UnquantizedFusedMoEMethod)


def _is_shareable(method: QuantizeMethodBase) -> bool:
    if current_platform.is_cpu():
        # Some kernels for quantised weights pack them, and do not declare it.
        return isinstance(method, _PLAIN)
    if type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading:
        return True  # the inherited method does nothing
    return bool(getattr(method, "supports_pre_processed_weights", False))


def process(model: nn.Module, model_config: Any, device: torch.device, *, again: bool, packed: bool = False) -> None:
    """Have vLLM convert loaded weights to the layout of its kernels, without moving them out of the model's memory.

    :param again: whether the weights have that layout already, and only the other state of the model is created.
    :param packed: whether kernels may pack weights into private memory.
    """
    # The server ties heads that repeat the embeddings, and engines get one tensor. In an engine the comparison would read all
    # weights, which :func:`_unpacked` hides.
    if getattr(model_config, "word_embeddings_untied_by_checkpoint", False):
        if not again:
            from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings

            maybe_retie_word_embeddings(model, model_config)
        model_config.word_embeddings_untied_by_checkpoint = False
    with nullcontext() if packed else _unpacked(model), _processed(again):
        process_weights_after_loading(model, model_config, device)


@contextmanager
def _processed(again: bool) -> Iterator[None]:
    if not again:
        yield
        return
    from vllm.model_executor.utils import weights_already_processed

    with weights_already_processed():
        yield


@contextmanager
def _unpacked(model: nn.Module) -> Iterator[None]:
    """Hide plain weights from vLLM's packing for the CPU: for layers on the meta device it uses torch's matrix product."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "quant_method", None), _PACKED)]
    held = [(module, dict(module._parameters)) for module in modules if current_platform.is_cpu()]
    for module, parameters in held:
        for name, parameter in parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    try:
        yield
    finally:
        for module, parameters in held:
            module._parameters.update(parameters)
