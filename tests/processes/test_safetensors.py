"""Weights from safetensors files: every bit arrives, in memory that is published as it lies, and damage is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared_rpc import Progress
from shared_rpc.extras import safetensors
from shared_rpc.extras.safetensors import load
from shared_rpc.memory.records import Record
from tests.kit.models import net, raw
from tests.kit.world import World

save_file = pytest.importorskip("safetensors.torch").save_file


def test_progress_is_reported_in_bytes(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From zero to all, never decreasing; the message is the file."""
    monkeypatch.setattr(safetensors, "_PART", 1000)
    file = tmp_path / "model.safetensors"
    save_file(net(), file, metadata={"format": "pt"})
    world.share("weights", execution="task", managed=True, access="read")(lambda: load(file, "cpu"))
    seen: list[Progress] = []
    client = world.client()
    task_id = client.submit("weights")
    with client.wait_for_task(task_id, callback=lambda info: seen.append(info.progress) if info.progress else None) as handle:
        assert raw(handle.value["embedding"]) == raw(net()["embedding"])
    total = sum(tensor.nbytes for tensor in net().values())
    done = [progress.done for progress in seen]
    assert (done, done[-1]) == (sorted(done), total)
    assert {(progress.total, progress.message) for progress in seen} == {(total, str(file))}


@pytest.mark.whole_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_loading_to_a_gpu_needs_only_the_weights(tmp_path: Path, published: Callable[..., Record]) -> None:
    """Loading and publishing 256 MiB takes 256 MiB, and a little for torch itself."""
    torch.zeros(1, device="cuda")
    save_file({f"w{number}": torch.ones(1 << 22) * number for number in range(16)}, tmp_path / "x.safetensors")
    before, _ = torch.cuda.mem_get_info()
    weights = load(tmp_path / "x.safetensors", "cuda")
    published(weights)
    after, _ = torch.cuda.mem_get_info()
    assert 256 <= (before - after) >> 20 <= 256 + 32
    assert {name: tensor[-1].item() for name, tensor in weights.items()} == {f"w{number}": number for number in range(16)}
