"""The tensor-parallel example: what it claims, for any number of ranks, on the host and on one or several GPUs."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from shared_rpc.extras.sharding import shard_state_dict
from tests.kit.processes import PYTHONPATH, ROOT, Child, eventually

EXAMPLE = ROOT / "examples" / "tensor_parallel"

pytestmark = pytest.mark.timeout(420)


class Example(NamedTuple):
    """The example's modules."""

    model: ModuleType
    one_client: ModuleType


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    """The example's modules, by the plain names they have for each other."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield Example(*map(importlib.import_module, Example._fields))
    for name in Example._fields:
        del sys.modules[name]


def run(base_path: str, *options: str, gpus: str) -> str:
    """What the example prints; its end is checked."""
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": gpus, "TMPDIR": str(Path(base_path).parent)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "run.py"), *options],
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode, "all checks passed" in done.stdout) == (0, True), done.stdout + done.stderr
    return done.stdout


def visible(count: int) -> str:
    """The names of so many of this process's GPUs."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:count]) or ",".join(map(str, range(count)))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@torch.inference_mode()
def test_all_parts_compute_what_the_whole_model_does(example: Example, world: int) -> None:
    """For 8 ranks too, where two of them have the same key and value head."""
    torch.manual_seed(0)
    whole = example.model.Transformer().eval()
    ranks = []
    for rank in range(world):
        ranks.append(example.model.Transformer(world=world).eval())
        ranks[rank].load_state_dict(shard_state_dict(whole.state_dict(), example.model.RULES, rank, world))
    tokens = torch.randint(example.model.CONFIG.vocabulary, (2, 16))

    torch.testing.assert_close(example.one_client.forward(ranks, tokens), whole(tokens), rtol=0, atol=1e-5)


def test_the_example(base_path: str) -> None:
    """Two servers, one client of both, and two ranks that talk through gloo, on host memory."""
    printed = run(base_path, gpus="")

    assert printed.count("ok  ") == 7
    assert printed.count("attached to cpu") == printed.count("gloo") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_example_leaves_nothing(base_path: str, children: list[Child], number: signal.Signals) -> None:
    """Ctrl-C, and SIGTERM, end all its processes; none of them stays, nor does a file."""
    with TemporaryDirectory() as scratch:  # the path of a socket must be short
        child = Child(str(EXAMPLE / "run.py"), environ={"CUDA_VISIBLE_DEVICES": "", "TMPDIR": scratch})
        children.append(child)
        child.expect("serving load_shard")
        started = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
        assert len(started) == 2

        child.process.send_signal(number)

        code, errors = child.close()
        assert (code, "Traceback" in errors) == (130, False)
        assert os.listdir(scratch) == []
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


@pytest.mark.gpu
def test_ranks_that_share_a_gpu(base_path: str) -> None:
    """One GPU, two servers on it: the ranks compute there, and talk through gloo."""
    printed = run(base_path, gpus=visible(1))

    assert printed.count("attached to cuda:0") == printed.count("gloo") == 2


@pytest.mark.gpu
def test_a_gpu_for_each_rank(base_path: str) -> None:
    """Two GPUs: each rank's part lies on its own, and the ranks talk through NCCL."""
    printed = run(base_path, gpus=visible(2))

    assert "attached to cuda:0" in printed and "attached to cuda:1" in printed
    assert printed.count("nccl") == 2
