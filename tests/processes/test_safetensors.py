"""Weights from safetensors files: every bit arrives, in memory that is published as it lies, and damage is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared_rpc import Progress, Provider
from shared_rpc.errors import TaskCancelled
from shared_rpc.extras import safetensors
from shared_rpc.extras.safetensors import load
from shared_rpc.memory import file_parts
from shared_rpc.memory.records import Record
from tests.kit.apps import Connect, Serve
from tests.kit.models import net, raw

save_file = pytest.importorskip("safetensors.torch").save_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A whole file of :func:`net`."""
    path = tmp_path / "model.safetensors"
    save_file(net(), path, metadata={"format": "pt"})
    return path


def shared(provider: Provider, file: Path) -> None:
    """An endpoint that loads a file."""
    provider.share("weights", execution="task", managed=True, access="read")(lambda: load(file, "cpu"))


def test_progress_is_reported_in_bytes(
    file: Path, provider: Provider, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From zero to all, never decreasing; the message is the file."""
    monkeypatch.setattr(safetensors, "_PART", 1000)
    shared(provider, file)
    serve()
    seen: list[Progress] = []
    client = connect()
    task_id = client.submit("weights")
    with client.wait_for_task(task_id, callback=lambda info: seen.append(info.progress) if info.progress else None) as handle:
        assert raw(handle.value["embedding"]) == raw(net()["embedding"])
    total = sum(tensor.nbytes for tensor in net().values())
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == total
    assert {(progress.total, progress.message) for progress in seen} == {(total, str(file))}


def test_cancelled_tasks_stop_reading(
    no_leaks: None, file: Path, provider: Provider, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is freed."""
    monkeypatch.setattr(safetensors, "_PART", 100)
    begun, go_on = threading.Event(), threading.Event()
    read = file_parts.read_exactly
    offsets: list[int] = []

    def slowly(fd: int, piece: memoryview, offset: int) -> None:
        begun.set()
        go_on.wait(10)
        offsets.append(offset)
        time.sleep(0.02)  # a slow disk
        read(fd, piece, offset)

    monkeypatch.setattr(file_parts, "read_exactly", slowly)
    shared(provider, file)
    serve()
    client = connect()
    task_id = client.submit("weights")
    assert begun.wait(10)
    assert client.cancel_task(task_id)
    go_on.set()
    with pytest.raises(TaskCancelled):
        client.wait_for_task(task_id, 10)
    assert len(offsets) < 280


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
