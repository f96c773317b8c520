"""NVIDIA's Multi-Process Service: features that work under it, and those that do not. The daemon is the tests' own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared_rpc import Client
from tests.kit.brokers import another_worker, worker_pids
from tests.kit.processes import PYTHONPATH, Child, eventually
from tests.kit.world import World

CONTROL = shutil.which("nvidia-cuda-mps-control")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mps,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CONTROL is None, reason="nvidia-cuda-mps-control is not installed"),
]

APP = """
import torch
from shared_rpc import Provider

provider = Provider(device="cuda")

@provider.share(managed=True, access="read")
def weights():
    return torch.full((1 << 20,), 7.0, device="cuda")

@provider.share(cache=False)
def plus(x):
    return x + 1
"""

#: A client that has the weights, and runs the lines that it receives.
CLIENT = """
import sys
import torch
from shared_rpc import Client

client = Client(device="cuda", timeout=60.0)
handle = client.call("weights")
print("attached", handle.value.sum().item(), flush=True)
for line in sys.stdin:
    try:
        exec(line)
        torch.cuda.synchronize()
        print("done", handle.value.sum().item(), flush=True)
    except Exception as error:
        print("failed", type(error).__name__, flush=True)
"""
SUM = str(7.0 * (1 << 20))


class Service:
    """The daemon, and the environment of its clients."""

    def __init__(self, folder: Path) -> None:
        self.environ = {}
        for name in ("PIPE", "LOG"):
            (folder / name).mkdir()
            self.environ[f"CUDA_MPS_{name}_DIRECTORY"] = str(folder / name)
        self.start()

    def start(self) -> None:
        """Start it, and wait for its pipe."""
        subprocess.run([str(CONTROL), "-d"], env=os.environ | self.environ, check=True, timeout=30)

    def stop(self) -> None:
        """End it, even if it has clients."""
        environ = os.environ | self.environ
        subprocess.run(
            [str(CONTROL)], env=environ, input="quit -t 2\n", text=True, capture_output=True, check=False, timeout=60
        )


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A daemon for this test. Its socket's path is short, since its length is limited."""
    service = Service(tmp_path_factory.mktemp("mps"))
    yield service
    service.stop()


@pytest.fixture
def broker(service: Service, tmp_path: Path, world: World) -> Child:
    """A broker whose workers use it."""
    app = tmp_path / "app.py"
    app.write_text(APP)
    child = world.start("-m", "shared_rpc.cli", "serve", str(app), environ=service.environ, cwd=tmp_path, fresh=True)
    child.expect("serving")
    return child


Attach = Callable[[], Child]


@pytest.fixture
def attach(service: Service, broker: Child, world: World) -> Attach:
    """Start a client that uses it, and attaches the weights."""

    def started() -> Child:
        child = world.start("-c", CLIENT, environ=service.environ, fresh=True)
        assert child.expect("attached") == f"attached {SUM}"
        return child

    return started


@pytest.fixture
def asking(broker: Child, base_path: str) -> Iterator[Client]:
    """A client in this process that uses no memory."""
    with Client(base_path, device="cuda", timeout=60.0) as client:
        yield client


def does(client: Child, line: str = "pass") -> str:
    """Run a line in a client; return its output."""
    client.tell(line)
    assert client.process.stdout is not None
    return client.process.stdout.readline().strip()


def test_info_and_doctor_report_mps(service: Service, asking: Client) -> None:
    """So clients see that they are not isolated."""
    mechanism = asking.get_server_info()["mechanism"]
    assert mechanism is not None and mechanism["mps"]
    environ = os.environ | service.environ | {"PYTHONPATH": PYTHONPATH}
    doctor = subprocess.run(
        [sys.executable, "-m", "shared_rpc.cli", "doctor"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "under MPS" in doctor.stdout


def test_a_killed_client_affects_no_other(attach: Attach, asking: Client) -> None:
    """Its lease ends, and the others continue."""
    killed, other = attach(), attach()
    killed.process.kill()
    eventually(lambda: asking.get_server_info()["leases"] == 1, 30.0, "the end of a lease")
    assert does(other) == f"done {SUM}"


def test_a_killed_worker_and_broker_affect_no_client(attach: Attach, asking: Client, broker: Child) -> None:
    """New clients call the next worker; memory outlives the broker."""
    client = attach()
    (worker,) = worker_pids(asking)
    os.kill(worker, signal.SIGKILL)
    assert does(client) == f"done {SUM}"
    another_worker(asking, worker)
    assert does(attach(), "assert client.call('plus', torch.ones(4, device='cuda')).tolist() == [2.0] * 4") == f"done {SUM}"
    broker.process.kill()
    assert does(client) == f"done {SUM}"


def test_models_are_suspended_and_resumed(attach: Attach) -> None:
    """With the same bytes."""
    assert does(attach(), "handle.suspend(); client.evict(handle); handle.resume()") == f"done {SUM}"


def test_short_calls_use_pools(attach: Attach) -> None:
    """Chunks are reused while both processes use the GPU."""
    line = "assert all(client.call('plus', torch.full((64,), n, device='cuda'))[0] == n + 1 for n in range(200))"
    assert does(attach(), line) == f"done {SUM}"


def test_a_write_to_read_only_memory_ends_the_other_clients(attach: Attach, asking: Client, service: Service) -> None:
    """But not the memory: after a restart of the service, workers are new processes, and clients attach to the same object."""
    culprit, other = attach(), attach()
    (item,) = asking.list_objects()
    assert does(culprit, "handle.value.fill_(1)").startswith("failed")
    eventually(lambda: does(other).startswith("failed"), 30.0, "the end of another client's context")
    service.stop()
    service.start()
    (worker,) = worker_pids(asking)
    os.kill(worker, signal.SIGKILL)
    another_worker(asking, worker)
    again = attach()
    assert does(again, "assert client.call('plus', torch.ones(4, device='cuda')).tolist() == [2.0] * 4") == f"done {SUM}"
    assert [each["object_id"] for each in asking.list_objects()] == [item["object_id"]]
