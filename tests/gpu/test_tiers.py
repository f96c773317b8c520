"""Objects of a GPU move to host memory and to files, and back: by a broker and its worker, and by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Client
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol.infos import DeviceInfo
from tests.kit.brokers import BrokerApp
from tests.kit.world import World

pytestmark = pytest.mark.gpu

ON_GPU = """
import numpy

provider.device = "cuda"

@provider.share(managed=True)
def weights(value):
    return torch.full((1 << 20,), float(value), device="cuda")

@provider.share(managed=True)
def mixed():
    module = torch.nn.Linear(64, 64, device="cuda")
    torch.nn.init.constant_(module.weight, 3)
    module.table = numpy.arange(1 << 16)
    return module
"""

#: How many bytes the tensors of ``weights`` have.
NBYTES = 4 << 20


@pytest.fixture(params=["broker", "one process"])
def client(request: pytest.FixtureRequest, broker_app: BrokerApp, world: World, tmp_path: Path) -> Client:
    """A client on the GPU, of a broker or of a server that runs its endpoints itself."""
    broker_app.write(ON_GPU)
    if request.param == "broker":
        broker_app.start(spill_dir=str(tmp_path))
    else:
        serves = (
            f"import app, shared_rpc; shared_rpc.Server(app.provider, spill_dir={str(tmp_path)!r}).start(); print('serving')"
        )
        child = world.start("-c", f"{serves}; input()", cwd=tmp_path)
        child.expect("serving")
    return broker_app.connect(device="cuda", timeout=120.0)


def gpu_of(client: Client) -> DeviceInfo:
    """Return the server's entry of its GPU."""
    return next(info for info in client.list_devices() if info["kind"] == "cuda")


def released(client: Client, endpoint: str, *args: Any) -> str:
    """Return the id of an object that has neither holders nor mappings here."""
    with client.call(endpoint, *args) as handle:
        object_id = str(handle.object_id)
    del handle
    MAPPINGS.drain()
    return object_id


@pytest.mark.parametrize("to", ["host", "file"])
def test_an_object_is_evicted_and_restored(client: Client, to: Any) -> None:
    """In between, the server uses no memory of the GPU; the next caller gets the same object with all writes."""
    with client.call("weights", 7) as handle:
        handle.value[5] = 42
        torch.cuda.synchronize()
        object_id = handle.object_id
    del handle
    (moved,) = client.evict(object_id, to)
    assert (moved["tier"], moved["nbytes"] >= NBYTES, moved["copied"] >= NBYTES) == (to, True, True)
    assert (gpu_of(client)["used"], gpu_of(client)["copies"]) == (0, {to: moved["nbytes"]})
    with client.call("weights", 7) as handle:
        assert handle.object_id == object_id
        assert handle.value[5] == 42 and handle.value.sum() == 7 * (1 << 20) + 35
    assert gpu_of(client)["used"] == moved["nbytes"]
    assert client.get_server_info()["builds"] == 1


@pytest.mark.parametrize("to", ["host", "file"])
def test_host_memory_stays_with_its_object(client: Client, to: Any) -> None:
    """An object on both devices is complete again: host memory is its own copy on the host."""
    object_id = released(client, "mixed")
    for _ in range(2):
        assert client.evict(object_id, to)[0]["tier"] == to
        with client.call("mixed") as handle:
            assert handle.object_id == object_id
            assert handle.value.weight.sum() == 3 * 64 * 64
            assert handle.value.table.sum() == sum(range(1 << 16))
        del handle
        MAPPINGS.drain()
