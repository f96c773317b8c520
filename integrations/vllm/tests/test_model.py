"""Checks of vLLM's features and models, without an engine."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

import vllm
from vllm.config.load import LoadConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.plugins import load_general_plugins

import shared_rpc_vllm
from shared_rpc import Provider
from shared_rpc.errors import ConfigurationError
from shared_rpc_vllm import NotShareable, app, layout, loader, model, state
from shared_rpc_vllm.request import plain, same_release


class Lines(logging.Handler):
    """Collects the lines of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a line."""
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The lines of vLLM's logger."""
    handler, logger = Lines(), logging.getLogger("vllm")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


def test_an_untested_release_of_vllm_causes_one_warning(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Features are detected independently of the release."""
    monkeypatch.setattr(vllm, "__version__", "99.1")
    for _ in range(2):
        model.warn_of_version()
    assert lines == ["--load-format shared_rpc is tested with vLLM 0.32.*; this is 99.1"]


def test_an_unsupported_release_of_vllm_works_without_the_load_format(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """With a warning."""
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.linear", None)
    monkeypatch.delitem(sys.modules, "shared_rpc_vllm.model")
    monkeypatch.delitem(sys.modules, "shared_rpc_vllm.loader")
    shared_rpc_vllm.register()
    (line,) = lines
    assert line.startswith("there is no --load-format shared_rpc with this release of vLLM: ")


def test_the_load_format_is_registered() -> None:
    """By vLLM's plugin mechanism; its options are checked early."""
    load_general_plugins()
    found = get_model_loader(LoadConfig(load_format="shared_rpc", model_loader_extra_config={"fallback": True}))
    assert isinstance(found, loader.SharedRpcLoader)
    assert found.options.fallback
    with pytest.raises(ConfigurationError, match="has 'fall_back'"):
        get_model_loader(LoadConfig(load_format="shared_rpc", model_loader_extra_config={"fall_back": True}))


class Untouched(QuantizeMethodBase):
    """A method without post-load processing."""

    def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def apply(self, layer: nn.Module, *_: Any, **__: Any) -> torch.Tensor:
        """Do nothing."""
        raise NotImplementedError


class Repacked(Untouched):
    """A method that packs weights in every engine."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack."""


class Processed(Repacked):
    """A method that skips weights that are packed already."""

    supports_pre_processed_weights = True


class Kernel:
    """A kernel that records a value while it processes weights."""

    def __init__(self) -> None:
        self.width: int | None = None
        self.table: torch.Tensor | None = None

    def process_weights_after_loading(self, layer: nn.Module, *, table: bool = False) -> None:
        """Record it."""
        self.width = layer.weight.shape[0]
        layer.has_scale = False
        if table:
            self.table = torch.arange(self.width)


def kernel_of(made: nn.Module) -> Kernel:
    """Return the kernel of the method of a model with one layer."""
    made.layer.weight = nn.Parameter(torch.zeros(3, 2))
    made.layer.quant_method.kernel = Kernel()
    return made.layer.quant_method.kernel  # type: ignore[no-any-return]


def test_an_engine_gets_values_that_kernels_recorded_in_the_server() -> None:
    """Of the kernel and of the layer; values of its own processing stay."""
    there, here, again = (layer_of(Processed()) for _ in range(3))
    processing = kernel_of(there)
    with state.recorded(there) as noted:
        processing.process_weights_after_loading(there.layer)
    kernel, done = kernel_of(here), kernel_of(again)
    done.width = 5
    for made in (here, again):
        state.restore(made, noted)
    assert (kernel.width, here.layer.has_scale, done.width) == (3, False, 5)


def test_objects_of_kernels_that_cannot_be_passed_are_refused_by_name() -> None:
    """Unless the engine has created them too."""
    there, here = layer_of(Processed()), layer_of(Processed())
    kernel = kernel_of(there)
    with state.recorded(there) as noted:
        kernel.process_weights_after_loading(there.layer, table=True)
    kernel_of(here)
    with pytest.raises(NotShareable, match=r"layer\.quant_method\.kernel\.table is made while weights are processed"):
        state.restore(here, noted)
    here.layer.quant_method.kernel.table = torch.arange(3)
    state.restore(here, noted)


def layer_of(method: QuantizeMethodBase) -> nn.Module:
    """A model with one layer of a method."""
    made = nn.Module()
    made.layer = nn.Module()
    made.layer.quant_method = method
    return made


@pytest.mark.parametrize("method", [Untouched(), Processed()], ids=lambda method: type(method).__name__)
def test_weights_that_need_no_processing_are_shared(monkeypatch: pytest.MonkeyPatch, method: QuantizeMethodBase) -> None:
    """Independently of the method's name; weights that each engine packs are refused with the layer and the method."""
    monkeypatch.setattr(model.current_platform, "is_cpu", lambda: False)
    model.refuse_methods(layer_of(method))
    with pytest.raises(NotShareable, match="layer is of Repacked, whose weights each engine processes for itself"):
        model.refuse_methods(layer_of(Repacked()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
@pytest.mark.parametrize("method", [Untouched(), Processed()], ids=lambda method: type(method).__name__)
def test_on_a_cpu_only_plain_weights_are_shared(method: QuantizeMethodBase) -> None:
    """Its kernels pack other weights without declaring it."""
    with pytest.raises(NotShareable, match="weights each engine processes for itself on cpu"):
        model.refuse_methods(layer_of(method))


def config_with(path: str) -> tuple[Any, Any]:
    """Return a configuration with one option, and its model configuration."""
    config = SimpleNamespace(model_config=SimpleNamespace())
    place = config
    *parts, last = path.split(".")
    for part in parts:
        place.__dict__.setdefault(part, SimpleNamespace())
        place = getattr(place, part)
    setattr(place, last, 1)
    return config, config.model_config


@pytest.mark.parametrize(("reason", "path"), model._REFUSED.items(), ids=lambda text: text.split(":")[0])
def test_an_option_that_moves_weights_is_refused_by_name(reason: str, path: str) -> None:
    """Before any request to a server."""
    with pytest.raises(NotShareable) as refused:
        model.refuse_engine(*config_with(path))
    assert str(refused.value) == f"the weights cannot be shared with {reason}"


def test_refused_options_exist_in_this_vllm() -> None:
    """A misspelt name would refuse nothing."""
    config = vllm.config.VllmConfig()
    fields = SimpleNamespace(**{field.name: field for field in dataclasses.fields(vllm.config.ModelConfig)})
    for path in model._REFUSED.values():
        place: Any = SimpleNamespace(model_config=fields) if path.startswith("model_config") else config
        for name in path.split("."):
            assert hasattr(place, name), path
            place = getattr(place, name)


def test_a_draft_model_is_refused_with_a_remedy() -> None:
    """It is built with parts of another model."""
    config = SimpleNamespace(model_config=SimpleNamespace())
    with pytest.raises(NotShareable, match=r"'draft_load_config': \{'load_format': 'auto'\}"):
        model.refuse_engine(config, SimpleNamespace())


def test_a_server_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the imported code when this package is reinstalled."""
    versions = {"shared-rpc-vllm": "0.0.9", "vllm": vllm.__version__}
    with pytest.raises(NotShareable, match=r"the server has shared-rpc-vllm 0\.1\.0, and this engine 0\.0\.9: end it with"):
        same_release(versions)


def test_a_value_that_is_not_plain_is_refused_by_name() -> None:
    """It cannot be sent to the server."""
    with pytest.raises(NotShareable, match=r"model_config\.hf_overrides\.rope is <object"):
        plain({"rope": object()}, "model_config.hf_overrides")


def test_an_engine_cannot_have_the_server_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights would be lost with the engine."""
    monkeypatch.setattr(app, "provider", Provider(execution_mode="server"))
    with pytest.raises(ConfigurationError, match="an engine cannot have SHARED_TENSOR_ROLE=server"):
        loader._loads_itself()
    app.provider.close()


@pytest.mark.parametrize(("role", "expected"), [("local", True), ("client", False), ("spawn", False)])
def test_nothing_is_shared_in_the_local_role(monkeypatch: pytest.MonkeyPatch, role: Any, expected: bool) -> None:
    """Like with any provider."""
    monkeypatch.setattr(app, "provider", Provider(execution_mode=role))
    assert loader._loads_itself() is expected


def test_the_weights_count_as_memory_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU vLLM gets their size first, with a separate loader: the attached weights are kept until the load."""
    handle = SimpleNamespace(get_object_info=lambda: {"nbytes": 16 << 30})
    monkeypatch.setattr(loader.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(loader, "_loads_itself", lambda: False)
    monkeypatch.setattr(loader, "_waiting", {})
    monkeypatch.setattr(loader.SharedRpcLoader, "_attach", lambda *_: ("the weights", handle, 1.5))
    asked = loader.SharedRpcLoader(LoadConfig(load_format="shared_rpc"))
    assert asked.get_external_weight_memory(SimpleNamespace(model_config=None)) == 16 << 30
    assert loader._waiting == {"the weights": (handle, 1.5)}


@pytest.mark.parametrize("fallback", [False, True])
def test_weights_that_cannot_be_shared_count_zero_bytes(monkeypatch: pytest.MonkeyPatch, fallback: bool) -> None:
    """Without a fallback the engine fails there already."""

    def refused(*_: object) -> None:
        raise NotShareable("the reason")

    monkeypatch.setattr(loader.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(loader, "_loads_itself", lambda: False)
    monkeypatch.setattr(loader.SharedRpcLoader, "_attach", refused)
    asked = loader.SharedRpcLoader(LoadConfig(load_format="shared_rpc", model_loader_extra_config={"fallback": fallback}))
    if fallback:
        assert asked.get_external_weight_memory(SimpleNamespace(model_config=None)) == 0
    else:
        with pytest.raises(NotShareable, match="the reason"):
            asked.get_external_weight_memory(SimpleNamespace(model_config=None))


def test_a_process_is_one_rank_of_several_during_a_load() -> None:
    """Models get rank and size; groups that are not in the layout have one process."""
    before = parallel_state._TP
    with layout.seated({"_WORLD": (1, 2), "_TP": (1, 2)}, torch.device("cpu")):
        assert parallel_state.get_tensor_model_parallel_rank() == 1
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        assert parallel_state.get_pp_group().is_first_rank
        assert parallel_state.get_pp_group().is_last_rank
        assert parallel_state.get_ep_group().device_group.size() == 1
        assert layout.layout_of_this_process() == {"_WORLD": (1, 2), "_TP": (1, 2)}
    assert parallel_state._TP is before
