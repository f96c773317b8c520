"""Engines over one copy of fused weights: CUDA graphs, compiled steps, and processes that start and end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Client
from tests.kit.brokers import BrokerApp, worker_pids
from tests.kit.processes import Child, eventually

#: A step is compiled in several processes.
pytestmark = pytest.mark.timeout(240)

WEIGHTS = """
from tests.kit.fused import build, weights_of

provider.device = {device!r}

@provider.share(managed=True, access="read", tensors="parameters")
def weights():
    return weights_of(build({device!r}))
"""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

#: How an engine's step runs, and where.
MODES = [("cpu", "eager"), *(pytest.param("cuda", mode, marks=pytest.mark.gpu) for mode in ("eager", "graph", "compile"))]

Start = Callable[..., Child]


def ask(engine: Child, line: str = "") -> dict[str, Any]:
    """Return the tokens that an engine generates."""
    engine.tell(line)
    found: dict[str, Any] = json.loads(engine.expect('"tokens"'))
    return found


@pytest.fixture
def start(tmp_path: Path, base_path: str) -> Iterator[Start]:
    """``start(source, mode, device)`` starts an engine, which is ended with the test."""
    engines: list[Child] = []

    def start(source: str, mode: str, device: str) -> Child:
        # The engines share a compilation cache, and no other test uses it.
        environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"), "TRITON_CACHE_DIR": str(tmp_path / "kernels")}
        engine = Child("-m", "tests.kit.fused", source, mode, base_path, device, environ=environ, fresh=device != "cpu")
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        if engine.process.returncode is None:
            engine.kill()
        for stream in (engine.process.stdin, engine.process.stdout, engine.process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def serve(broker_app: BrokerApp) -> Callable[[str], Client]:
    """``serve(device)`` returns a client of a broker whose worker has the weights on a device."""

    def serve(device: str) -> Client:
        broker_app.write(WEIGHTS.format(device=device))
        broker_app.start()
        return broker_app.connect(device=device, timeout=120.0)

    return serve


@pytest.mark.parametrize(("device", "mode"), MODES)
def test_shared_weights_compute_like_private_ones(start: Start, serve: Callable[[str], Client], device: str, mode: str) -> None:
    """Every bit of the logits, in two engines that write to their own scales, and again after one of them was killed."""
    client = serve(device)
    own = start("own", mode, device)
    expected = ask(own)
    first, second = start("shared", mode, device), start("shared", mode, device)
    assert ask(first) == ask(second) == expected
    (info,) = client.list_objects()
    assert {holder["pid"] for holder in info["holders"]} == {first.pid, second.pid}
    first.tell("")  # it computes while it is killed
    first.kill()
    eventually(lambda: client.list_objects()[0]["leases"] == 1, what="its lease is released")
    os.kill(worker_pids(client)[0], signal.SIGKILL)
    assert ask(second) == expected
    assert ask(start("shared", mode, device)) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_that_writes_into_a_weight_ends_alone(start: Start, serve: Callable[[str], Client], device: str) -> None:
    """The others generate as before, as does one that starts afterwards."""
    serve(device)
    faulty, other = start("shared", "eager", device), start("shared", "eager", device)
    expected = ask(other)
    assert ask(faulty) == expected
    faulty.tell("write")
    code, _ = faulty.close()
    assert code != 0
    assert ask(other) == ask(start("shared", "eager", device)) == expected


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_memory_is_one_copy_and_is_freed(start: Start, serve: Callable[[str], Client]) -> None:
    """With engines killed while they replay graphs, the GPU has its earlier free memory once the weights are dropped."""
    client = serve("cuda")
    client.call("weights").release()
    client.invalidate_endpoint_cache("weights")
    free = torch.cuda.mem_get_info()[0]
    engines = [start("shared", "graph", "cuda") for _ in range(3)]
    for engine in engines:
        ask(engine)
        engine.tell("")
        engine.kill()
    client.invalidate_endpoint_cache("weights")
    eventually(lambda: torch.cuda.mem_get_info()[0] >= free - (16 << 20), 30.0, "the memory is free again")
