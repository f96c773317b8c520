"""Weight transfer: a trainer in this process sends its weights to engines, which then generate with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

import engine
from conftest import Engine, Failed, Place
from shared_rpc.errors import ConfigurationError
from shared_rpc_vllm import app
from shared_rpc_vllm.weight_transfer import SharedRpcTrainer, SharedRpcTrainerInfo
from tests.kit.deep import deep

Ordinary = Callable[[Path], list[int]]
OPTIONS = {"weight_transfer_config": {"backend": "shared_rpc"}}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Sync:
    """Weight-transfer client for the engines of a test, like vLLM's clients for its server and for Ray actors."""

    def __init__(self, *engines: Engine) -> None:
        self._engines = engines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have engines open the channel."""
        self._all("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Start an update."""
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive weights."""
        self._all("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update."""
        self._all("finish_weight_update")

    def _all(self, *step: Any) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda made: made.ask(engine.weight_sync, *step), self._engines))


def trained(model: Path, rate: float = 1.0) -> Any:
    """Load a model of transformers from a checkpoint, and train it for one step."""
    module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(DEVICE)
    tokens = torch.tensor([[*engine.PROMPT, 200, 300, 400, 7]], device=DEVICE)
    module(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(rate * parameter.grad)
    return module


@pytest.fixture(autouse=True)
def base_path(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use the server of the test for the trainer too."""
    monkeypatch.setattr(app.provider, "base_path", place.base_path)
    load_general_plugins()
    return place.base_path


def trainer(source: Any, *engines: Engine, **options: Any) -> SharedRpcTrainer:
    """Create a trainer by the name of the backend."""
    info = SharedRpcTrainerInfo(rank=0, device=DEVICE, nbytes=1 << 18, readers=len(engines), timeout=30.0, **options)
    made = WeightTransferTrainerFactory.trainer_init(info, client=Sync(*engines), source=source)
    assert isinstance(made, SharedRpcTrainer)
    return made


@pytest.mark.parametrize(
    ("family", "load_format"), [("llama", "shared_rpc"), *deep(("llama", "auto"), ("qwen", "auto"), ("qwen", "shared_rpc"))]
)
def test_an_engine_generates_with_received_weights(
    place: Place, models: dict[str, Path], ordinary: Ordinary, tmp_path: Path, family: str, load_format: str
) -> None:
    """Like one that loads them from a file; engines that share the previous weights keep them."""
    made = place.start(models[family], load_format=load_format, **OPTIONS)
    assert made.ask(engine.generate) == ordinary(models[family])
    module = trained(models[family])
    sending = trainer(ModuleSource(module), made)
    for step in range(2):
        sending.send_weights()
        module.save_pretrained(tmp_path / str(step))
        assert made.ask(engine.generate) == ordinary(tmp_path / str(step)) != ordinary(models[family])
        with torch.no_grad():
            module.model.embed_tokens.weight.copy_(module.model.embed_tokens.weight.flip(0))
    sending.shutdown()
    made.close()
    if load_format == "shared_rpc":
        with place.start(models[family]) as other:
            assert other.ask(engine.generate) == ordinary(models[family])


class Faulty(ModuleSource):
    """A source that calls a function once, before a weight of the last layer."""

    def __init__(self, module: Any, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(module)
        self._faults = [fault]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().__iter__():
            yield name, self._faults.pop()(tensor) if "layers.1.mlp.up_proj" in name and self._faults else tensor


def _misshapen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:5]


def _raising(tensor: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize(("fault", "expected"), [(_misshapen, Failed), *deep((_raising, ZeroDivisionError))])
def test_after_a_failed_transfer_the_next_one_succeeds(
    place: Place, models: dict[str, Path], ordinary: Ordinary, tmp_path: Path, fault: Any, expected: type[Exception]
) -> None:
    """If one of two engines or the trainer fails, neither side waits for the other; then all engines take part again."""
    pair = [place.start(models["llama"], **OPTIONS) for _ in range(2)]
    module = trained(models["llama"])
    sending = trainer(Faulty(module, fault), *pair)
    with pytest.raises(expected):
        sending.send_weights()
    sending.send_weights()
    module.save_pretrained(tmp_path / "trained")
    for made in pair:
        assert made.ask(engine.generate) == ordinary(tmp_path / "trained")
        made.close()
    sending.shutdown()


def test_an_engine_does_not_wait_for_a_trainer_that_has_ended(place: Place, models: dict[str, Path]) -> None:
    """The error names the end of the trainer; another trainer can use the engine."""
    made = place.start(models["llama"], **OPTIONS)
    sending = trainer(ModuleSource(trained(models["llama"])), made)
    made.ask(engine.weight_sync, "start_weight_update")
    sending.shutdown()
    with pytest.raises(Failed, match=r"ChannelClosed: the sender of channel"):
        made.ask(engine.weight_sync, "update_weights", {"update_info": {}})
    with pytest.raises(Failed, match="start_weight_update must be called"):
        made.ask(engine.weight_sync, "update_weights", {"update_info": {}})
    sending.send_weights()
    made.close()


def test_a_source_with_a_part_on_each_rank_is_refused() -> None:
    """The channel has one sender."""

    class Parts(ModuleSource):
        def held_names(self) -> list[str]:
            return ["bias"]

    with pytest.raises(ConfigurationError, match="needs a source that has all weights on rank 0"):
        trainer(Parts(torch.nn.Linear(1, 1)))
    with pytest.raises(ConfigurationError, match="needs a source that has all weights on rank 0"):
        trainer(None)
