"""The sleep-mode backend with a server in this process and without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

import shared_rpc_vllm.app
from shared_rpc import Client, Handle, Provider, Server
from shared_rpc_vllm import LOAD_FORMAT, NotShareable, loader, register
from shared_rpc_vllm.model import choose_sleep_mode, refuse_engine
from shared_rpc_vllm.sleeping import SharedRpcSleepMode

Weights = Handle[dict[str, torch.Tensor]]


class Allocator:
    """A backend for private memory, like vLLM's on a GPU, that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.broken = False

    def suspend(self, level: int = 1) -> None:
        """Record the call, or fail."""
        if self.broken:
            raise RuntimeError("out of pinned memory")
        self.calls.append(("suspend", level))

    def resume(self, tags: list[str] | None = None) -> None:
        """Record the call."""
        self.calls.append(("resume", tags))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Record the call."""
        self.calls.append(("discard", tags))


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weights]:
    """Attached weights in a model of this process; their server has a lower tier."""
    base_path = str(tmp_path / "s")
    app = Provider(base_path, device="cpu", execution_mode="server")

    @app.share("weights", managed=True, access="read")
    def load() -> dict[str, torch.Tensor]:
        return {"weight": torch.arange(1 << 16, dtype=torch.float32)}

    with Server(app, spill_dir=tmp_path), Client(base_path, device="cpu") as client:
        monkeypatch.setattr(shared_rpc_vllm.app, "provider", client)  # it evicts as a provider does
        with client.call("weights") as handle:
            loader.attached.add(handle)
            yield handle


@pytest.fixture
def backend() -> SharedRpcSleepMode:
    """The backend, with an allocator."""
    made = SharedRpcSleepMode()
    made._own = Allocator()  # type: ignore[assignment]
    return made


def own(backend: SharedRpcSleepMode) -> Allocator:
    """Return the allocator of a backend."""
    assert isinstance(backend._own, Allocator)
    return backend._own


def config(**options: Any) -> Any:
    """Return the relevant part of an engine's configuration."""
    model = {"enable_sleep_mode": True, "sleep_mode_backend": "cumem", "sleep_preserve_parameter_names": [], **options}
    return SimpleNamespace(model_config=SimpleNamespace(**model))


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_has_no_weights_until_it_wakes(weights: Weights, backend: SharedRpcSleepMode, level: int) -> None:
    """At the same address, at both levels; the server has them in a lower tier in between."""
    tensor = weights.value["weight"]
    address = tensor.data_ptr()
    backend.suspend(level)
    assert backend.state() == "SUSPENDED"
    assert weights.suspended
    assert weights.get_object_info()["tier"] == "file"
    backend.resume()
    assert backend.state() == "RUNNING"
    assert weights.get_object_info()["tier"] == "device"
    assert weights.value["weight"].data_ptr() == address
    assert torch.equal(tensor, torch.arange(1 << 16, dtype=torch.float32))


def test_private_memory_is_managed_by_vllms_allocator(weights: Weights, backend: SharedRpcSleepMode) -> None:
    """Level 2 is level 1 for private tensors among the weights, which are in no checkpoint."""
    backend.suspend(2)
    backend.resume(["weights"])
    backend.resume(["kv_cache"])
    assert own(backend).calls == [("suspend", 1), ("resume", ["weights"]), ("resume", ["kv_cache"])]


def test_a_wake_of_the_cache_alone_leaves_the_weights_asleep(weights: Weights, backend: SharedRpcSleepMode) -> None:
    """Until they are requested."""
    backend.suspend()
    backend.resume(["kv_cache"])
    assert weights.suspended
    backend.resume(["weights"])
    assert not weights.suspended


def test_weights_of_an_awake_engine_stay_on_their_device(weights: Weights, backend: SharedRpcSleepMode, tmp_path: Path) -> None:
    """It continues with them; the sleeping engine can still wake."""
    with Client(f"{tmp_path}/s", device="cpu") as other, other.call("weights") as awake:
        backend.suspend()
        assert awake.get_object_info()["tier"] == "device"
        assert awake.value["weight"][7] == 7
    backend.resume()
    assert weights.value["weight"][7] == 7


def test_shared_weights_are_not_discarded(weights: Weights, backend: SharedRpcSleepMode) -> None:
    """Other memory is."""
    backend.discard(("weights", "kv_cache"))
    assert own(backend).calls == [("discard", ("kv_cache",))]
    assert weights.value["weight"][7] == 7


def test_an_engine_that_cannot_sleep_stays_awake(weights: Weights, backend: SharedRpcSleepMode) -> None:
    """With its weights: suspended handles are resumed."""
    own(backend).broken = True
    with pytest.raises(RuntimeError, match="pinned"):
        backend.suspend()
    assert not weights.suspended
    assert weights.value["weight"][7] == 7


def test_vllm_finds_the_backend_by_its_name() -> None:
    """Even if the plugin is loaded several times."""
    register(), register()
    assert SleepModeBackendFactory.get_backend_class(LOAD_FORMAT) is SharedRpcSleepMode


def test_an_engine_with_shared_weights_uses_this_backend() -> None:
    """vLLM has no option to select it."""
    engine = config()
    refuse_engine(engine, engine.model_config)
    choose_sleep_mode(engine.model_config)
    assert isinstance(SleepModeBackendFactory.create_backend(engine.model_config), SharedRpcSleepMode)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sleep_mode_backend": "criu"}, "the sleep-mode backend 'criu': use 'shared_rpc'"),
        ({"sleep_mode_backend": None}, "--enable-sleep-mode of vLLM"),
        ({"sleep_preserve_parameter_names": ["*.bias"]}, "--sleep-preserve-parameter-names"),
    ],
    ids=["another", "none", "preserve"],
)
def test_another_sleep_mode_is_refused(options: dict[str, Any], words: str) -> None:
    """It would free the weights of all engines, or write to them."""
    engine = config(**options)
    with pytest.raises(NotShareable, match=words):
        refuse_engine(engine, engine.model_config)
