"""The loader of an engine, which attaches to the server's weights; the server loads them for the first engine."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from shared_rpc import Handle
from shared_rpc.errors import ConfigurationError, EndpointNotFound
from shared_rpc.memory.devices import device_id
from shared_rpc.provider.provider import SharedFunction
from shared_rpc_vllm import LOAD_FORMAT, NotShareable
from shared_rpc_vllm.binding import WithoutWeights, bind, refuse_meta
from shared_rpc_vllm.layout import layout_of_this_process
from shared_rpc_vllm.model import choose_sleep_mode, process, refuse_engine, warn_of_version
from shared_rpc_vllm.options import LoaderOptions
from shared_rpc_vllm.request import label, request_of
from shared_rpc_vllm.state import State, restore

_log = init_logger(f"vllm.{__name__}")

#: The weights, and the state that the kernels need.
Weights = Handle[tuple[dict[str, torch.Tensor], State]]

#: By label, attached weights that no model uses yet, with the seconds of the attach: vLLM creates one loader to get the size of
#: the weights, and another one to load them.
_waiting: dict[str, tuple[Weights, float]] = {}

#: The handles of this process whose weights are in a model, which keeps them alive.
attached: weakref.WeakSet[Weights] = weakref.WeakSet()


class SharedRpcLoader(BaseModelLoader):
    """The loader of ``--load-format shared_rpc``; its options are :class:`~shared_rpc_vllm.options.LoaderOptions`."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.options = LoaderOptions.of(load_config.model_loader_extra_config or {})

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the server downloads the model."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Refuse to write to weights.

        :raises NotShareable: always.
        """
        _refuse_to_load()

    def get_all_weights(self, model_config: Any, model: nn.Module) -> NoReturn:
        """Refuse to reload weights from disk; called by ``reload_weights`` of a worker.

        :raises NotShareable: always.
        """
        _refuse_to_load()

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Return the bytes of the weights, which count for this engine but are in none of its allocators.

        The weights are in memory when this returns, because vLLM measures the free memory next.
        """
        if current_platform.is_cpu() or _loads_itself() or _is_trained(vllm_config):
            return 0
        try:
            name, handle, seconds = self._attach(vllm_config, vllm_config.model_config)
        except Exception:
            if self.options.fallback:
                return 0  # load_model() logs the reason
            raise
        _waiting[name] = handle, seconds
        return handle.get_object_info()["nbytes"]

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Return a model around the server's weights, without reading or copying weights in this process.

        :raises NotShareable: if the weights cannot be shared, and the option ``fallback`` is not set.
        """
        if _loads_itself():
            return self._load_here(vllm_config, model_config, prefix)
        layers = vllm_config.compilation_config.static_forward_context
        before = dict(layers)
        try:
            warn_of_version()
            name, handle, attached_in = self._attach(vllm_config, model_config)
            began = time.perf_counter()
            nbytes, (tensors, state) = handle.get_object_info()["nbytes"], handle.value
            if _is_trained(vllm_config):
                tensors = _copied(tensors)
                handle.release()
                model = _built(tensors, state, vllm_config, model_config, prefix, packed=True)
            else:
                model = _built(tensors, state, vllm_config, model_config, prefix)
                model.load_weights = _reload_of(model, handle)  # type: ignore[assignment]
                choose_sleep_mode(vllm_config.model_config)
                attached.add(handle)
        except Exception as error:
            if not self.options.fallback:
                raise
            _log.warning_once("the weights are loaded privately (fallback): %s: %s", type(error).__name__, error)
            # Layers of the abandoned model are registered under the names of the new one.
            layers.clear()
            layers.update(before)
            return self._load_here(vllm_config, model_config, prefix)
        _log.info(
            "attached to '%s' in %.1f ms, made the model in %.1f ms: %d tensors, %.2f GiB",
            name,
            1e3 * attached_in,
            1e3 * (time.perf_counter() - began),
            len(tensors),
            nbytes / 2**30,
        )
        return model

    def preload(self, vllm_config: Any) -> str:
        """Have the server load the weights for an engine with this configuration, unless it has them; return the label."""
        return self._attach(vllm_config, _alone(vllm_config))[0]

    def refresh(self, vllm_config: Any) -> str:
        """Have the server load the weights again, for engines that start afterwards; return the label and the generation."""
        name, request = self._request(vllm_config, _alone(vllm_config))
        with _explained(self.options) as weights:
            return f"{name}, generation {weights.refresh(name, request).generation}"

    def _request(self, vllm_config: Any, model_config: Any) -> tuple[str, dict[str, Any]]:
        """Return label and description of the weights of this process."""
        refuse_engine(vllm_config, model_config)
        request = request_of(vllm_config, layout_of_this_process(), self.options.load_format)
        return label(request), request

    def _attach(self, vllm_config: Any, model_config: Any) -> tuple[str, Weights, float]:
        """Return label and handle of the weights, and the seconds of the attach.

        The server is started if none runs, and loads the weights if it does not have them.
        """
        name, request = self._request(vllm_config, model_config)
        if name in _waiting:
            return name, *_waiting.pop(name)
        began = time.perf_counter()
        with _explained(self.options) as weights:
            return name, weights(name, request), time.perf_counter() - began

    def _load_here(self, vllm_config: Any, model_config: Any, prefix: str) -> nn.Module:
        config = type(self.load_config)(
            **{**vars(self.load_config), "load_format": self.options.load_format, "model_loader_extra_config": {}}
        )
        loader = DefaultModelLoader(config)
        return cast(nn.Module, loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix))


def _loads_itself() -> bool:
    """Return True in the role ``local``, in which nothing is shared.

    :raises ConfigurationError: in the role ``server``, which an engine cannot have.
    """
    from shared_rpc_vllm.app import provider

    if provider.execution_mode == "server":
        raise ConfigurationError(
            "an engine cannot have SHARED_TENSOR_ROLE=server: leave it unset, and the first engine starts a server; or run "
            "'shared-rpc serve shared_rpc_vllm.app' and give engines the role 'client'"
        )
    return provider.execution_mode == "local"


def _alone(vllm_config: Any) -> Any:
    """Return the model configuration of an engine with one rank.

    :raises NotShareable: for several ranks, because only they know their parts of the weights.
    """
    if vllm_config.parallel_config.world_size > 1:
        raise NotShareable("weights of several ranks are loaded when the ranks request them: start an engine")
    return vllm_config.model_config


@contextmanager
def _explained(options: LoaderOptions) -> Iterator[SharedFunction[[str, dict[str, Any]], Weights]]:
    """Yield the endpoint of the server selected by the options.

    :raises NotShareable: if the server has no such endpoint, with the probable cause.
    """
    from shared_rpc_vllm.app import ENDPOINT, provider, weights

    if options.base_path is not None:
        provider.base_path = options.base_path
    provider.device = "cpu" if current_platform.is_cpu() else device_id("cuda")
    try:
        yield weights
    except EndpointNotFound as error:
        raise NotShareable(
            f"the server at {provider.get_runtime_info()['socket_path']} has no endpoint {ENDPOINT!r}: it has another "
            f"release of shared-rpc-vllm, or another app. Stop it with 'shared-rpc stop' (running engines keep their "
            f"weights), or set another base_path"
        ) from error


def _is_trained(vllm_config: Any) -> bool:
    """Return True if the engine receives weights from a trainer, and therefore needs a private copy."""
    return getattr(vllm_config, "weight_transfer_config", None) is not None


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors; a tensor with several names is copied once."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            copy = tensor.detach().clone()
            copies[id(tensor)] = nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _built(
    tensors: dict[str, torch.Tensor], state: State, vllm_config: Any, model_config: Any, prefix: str, packed: bool = False
) -> nn.Module:
    """Build an engine's model around tensors.

    :param state: recorded in the server, see :mod:`shared_rpc_vllm.state`.
    :param packed: whether kernels may pack weights into private memory.
    """
    device = torch.device(vllm_config.device_config.device)
    with set_default_torch_dtype(model_config.dtype):
        with device, WithoutWeights():
            model: nn.Module = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        bind(model, tensors)
        process(model, model_config, device, again=True, packed=packed)
        restore(model, state)
    refuse_meta(model)
    return model.eval()


def _reload_of(model: nn.Module, handle: Weights) -> Callable[..., NoReturn]:
    """Return the ``load_weights`` of an attached model."""

    def load_weights(*_: object, **__: object) -> NoReturn:
        # vLLM has replaced the tensors by ones on the meta device, as targets of the load.
        bind(model, handle.value[0])
        _refuse_to_load()

    return load_weights


def _refuse_to_load() -> NoReturn:
    raise NotShareable(
        f"the weights of --load-format {LOAD_FORMAT} are those of all engines, and read-only: an engine cannot load others. "
        f"Start a new engine, which loads the new weights if the checkpoint has changed"
    )
