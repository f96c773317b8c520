"""A broker and its workers over the memory of a GPU."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from shared_rpc import Client, errors
from tests.kit.brokers import BrokerApp, another_worker, worker_pids
from tests.kit.processes import eventually

pytestmark = pytest.mark.gpu

ON_GPU = """
provider.device = "cuda"

@provider.share
def weights(value):
    return torch.full((1 << 20,), float(value), device="cuda")

@provider.share(cache=False)
def plus(x):
    return x + 1
"""


@pytest.fixture
def app(broker_app: BrokerApp) -> BrokerApp:
    """An app on the GPU, not served yet."""
    broker_app.write(ON_GPU)
    return broker_app


def connect(app: BrokerApp) -> Client:
    """A client on the GPU."""
    return app.connect(device="cuda", timeout=60.0)


def test_objects_outlive_the_worker_that_built_them(app: BrokerApp) -> None:
    """Every byte, for attached clients and for later ones; a write is visible, and the next build succeeds."""
    app.start()
    client = connect(app)
    before = client.call("weights", 7)
    first = worker_pids(client)[0]
    os.kill(first, signal.SIGKILL)
    after = connect(app).call("weights", 7)
    assert bool((after == 7).all())
    after.fill_(9)
    torch.cuda.synchronize()
    assert bool((before == 9).all())
    another_worker(client, first)
    assert bool((client.call("weights", 8) == 8).all())


def test_a_broker_holds_no_memory_of_its_own_on_the_gpu(app: BrokerApp) -> None:
    """It has neither CUDA nor torch, and the device's memory in use is that of the objects."""
    broker = app.start(fresh=True)
    client = connect(app)
    kept = client.call("weights", 1), client.create_buffer(1 << 20), client.call("plus", torch.ones(10, device="cuda"))
    with open(f"/proc/{broker.pid}/maps", encoding="utf-8") as maps:
        libraries = maps.read()
    for name in ("libtorch", "libcuda", "/dev/nvidia"):
        assert name not in libraries
    assert len(kept) == 3


@pytest.mark.whole_gpu
def test_memory_of_a_killed_build_is_freed_with_its_worker(app: BrokerApp) -> None:
    """A worker that dies with 1 GiB that it has not sent leaves nothing of it."""
    app.write(
        ON_GPU,
        """
        @provider.share(cache=False)
        def die():
            torch.ones(1 << 28, device="cuda")
            torch.cuda.synchronize()
            os.kill(os.getpid(), 9)
        """,
    )
    app.start()
    client = connect(app)
    client.call("weights", 1)
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(errors.WorkerCrashed):
        client.call("die")
    # The next worker's context is made with its first build.
    eventually(lambda: torch.cuda.mem_get_info()[0] >= free - (64 << 20), what="its memory is free again")
