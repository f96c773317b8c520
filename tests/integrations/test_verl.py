"""verl's own manager of checkpoint engines drives the engine of examples/, between worker groups of Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Client, Provider, Server
from tests.kit.interpreter import bits
from tests.kit.processes import PYTHONPATH, ROOT

ray = pytest.importorskip("ray")
pytest.importorskip("verl.checkpoint_engine", exc_type=ImportError)

from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker  # noqa: E402
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from verl.utils.import_utils import import_external_libs  # noqa: E402
from verl.workers.config import CheckpointEngineConfig, RolloutConfig  # noqa: E402

pytestmark = [
    # Those of verl's and Ray's own.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]

CONFIG = CheckpointEngineConfig(
    backend="shared_rpc",
    update_weights_bucket_megabytes=1,
    custom_backend_module="verl_checkpoint_engine",
)


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return the trainer's weights after a step: more than a bucket, one larger than that, and one of another dtype."""
    generator = torch.Generator().manual_seed(step)
    sizes = {f"layers.{number}.weight": (300, 512) for number in range(5)} | {"head.weight": (1500, 512), "scale": ()}
    made = {name: torch.randn(size, generator=generator, dtype=torch.bfloat16) for name, size in sizes.items()}
    return {**made, "gate.weight": torch.nn.Parameter(torch.randn(7, 3, generator=generator))}


class Trainer(Worker):
    """The interface of verl's actor worker that the manager uses, with our weights."""

    def __init__(self) -> None:
        super().__init__()
        import_external_libs(CONFIG.custom_backend_module)
        bucket_size = CONFIG.update_weights_bucket_megabytes << 20
        self.engine = CheckpointEngineRegistry.new(CONFIG.backend, is_master=self.rank == 0, bucket_size=bucket_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, Any]:
        """Send the weights."""
        return await self.engine.send_weights(iter(weights(global_steps).items()), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine."""
        return getattr(self.engine, method)(*args, **kwargs)


class Adapter:
    """The adapter that loads the weights in a rollout worker."""

    def __init__(self) -> None:
        self.received: dict[str, str] = {}

    async def update_weights(self, weights: Any, **_: Any) -> None:
        """Record every weight."""
        self.received = {name: bits(weight) async for name, weight in weights}


class Rollout(CheckpointEngineWorker):
    """verl's rollout worker, which reports the received weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def received(self) -> tuple[dict[str, str], str]:
        """Return the received weights, and the segments mapped in this process."""
        return self.server_adapter.received, Path("/proc/self/maps").read_text()


class Replica:
    """Rollout workers in the manager's format, without an engine that has requests or a cache."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def _nothing(self, **_: Any) -> None:
        pass

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


def group(kind: type[Worker], **options: Any) -> RayWorkerGroup:
    """Two workers, each in its own process."""
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(kind), **options))


@pytest.fixture
def manager(base_path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointEngineManager]:
    """verl's manager of two trainers and two rollouts, next to a server."""
    environ = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT / "tests/compat/site"), PYTHONPATH]),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(ROOT / "examples")
    with Server(Provider(base_path, execution_mode="server", device="cpu")):
        ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=128 << 20)
        try:
            config = RolloutConfig(name="vllm", checkpoint_engine=CONFIG)
            rollouts = group(Rollout, rollout_config=config, model_config=None, server_adapter=Adapter())
            yield CheckpointEngineManager(CONFIG, group(Trainer), [Replica(rollouts.workers)])
        finally:
            ray.shutdown()


def test_every_rollout_receives_each_update(manager: CheckpointEngineManager, base_path: str) -> None:
    """The weights are equal bit for bit, and neither the rollouts nor the server keep memory of an update."""
    rollouts = manager.replicas[0].workers
    for step in range(3):
        manager.update_weights(step)
        sent = {name: bits(weight) for name, weight in weights(step).items()}
        for received, maps in ray.get([rollout.received.remote() for rollout in rollouts]):
            assert received == sent
            assert "memfd:" not in maps
    with Client(base_path, device="cpu") as client:
        assert client.list_objects() == []
