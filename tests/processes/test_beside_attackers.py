"""Clients that exhaust what a broker has: others are served, and no object is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, Handle
from shared_rpc.errors import ServerBusy
from tests.kit import attacker
from tests.kit.attacker import Bystander
from tests.kit.brokers import BrokerApp, another_worker, worker_pids
from tests.kit.processes import Child, eventually

#: Descriptors that the broker may have.
LIMIT = 1024
#: Seconds that the bystander may wait on a machine with other work; without the limits it waits for up to a minute.
PATIENCE = 15.0
#: Bytes that the broker may take besides its objects.
MEMORY = 256 << 20

LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))\n"

ENDPOINT = """
@provider.share
def each(n):
    return torch.full((8,), float(n))
"""

Attack = Callable[[ExitStack, str], None]


class Served:
    """A broker, a client that behaves, and its objects."""

    def __init__(self, app: BrokerApp) -> None:
        app.write(ENDPOINT)
        self.app = app
        self.broker: Child = app.start_program(app.program(LIMITED.format(LIMIT)))
        self.client: Client = app.connect(timeout=60.0)
        self.path = self.client.get_server_info()["socket_path"] or ""
        self.handle: Handle = self.client.call("held", 8)
        self.before = self.resident()

    def resident(self) -> int:
        """The broker's peak memory since :meth:`forget`."""
        status = Path(f"/proc/{self.broker.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10

    def check(self, bystander: Bystander) -> None:
        """Check that the bystander was served, and still has its objects."""
        assert not bystander.errors
        assert bystander.worst < PATIENCE
        assert self.resident() - self.before < MEMORY
        assert self.handle.value.tolist() == [7.0] * 8
        assert self.client.call("held", 8).object_id == self.handle.object_id
        with self.app.connect(connect_timeout=PATIENCE) as another:
            another.ping()


@pytest.fixture
def served(broker_app: BrokerApp) -> Iterator[Served]:
    """The broker with a client."""
    served = Served(broker_app)
    yield served
    served.handle.release()


@pytest.mark.parametrize(
    "attack",
    [
        attacker.half_frames,
        attacker.descriptors_of_half_frames,
        attacker.unread_answers,
        attacker.waiters,
    ],
)
def test_clients_are_served_during_an_attack(served: Served, attack: Attack) -> None:
    """In bounded time and memory; and the broker survives."""
    with Bystander(served.client) as bystander, ExitStack() as stack:
        attack(stack, served.path)
        served.client.ping()
        served.check(bystander)
    served.check(bystander)


def test_the_connection_that_exhausts_descriptors_is_logged(served: Served) -> None:
    """With its process."""
    with ExitStack() as stack:
        attacker.descriptors_of_half_frames(stack, served.path)
        line = served.broker.expect_error("closed the connection of pid")
    assert f"pid {os.getpid()}: it holds " in line
    eventually(lambda: served.client.get_server_info()["sessions"] == 1)


# Objects: the descriptors of a small broker.

#: Descriptors that a server may have in these tests, and the number of open ones at which no object gets another.
FEW, FULL = 256, 192

KEPT = """
@provider.share(managed=True, cache=False, host_copy="never")
def kept(n):
    return torch.full((8,), float(n))
"""


@pytest.fixture
def client(broker_app: BrokerApp) -> Client:
    """A client of a broker with few descriptors."""
    broker_app.write(KEPT)
    broker_app.start_program(broker_app.program(LIMITED.format(FEW)))
    return broker_app.connect()


def test_objects_exhaust_descriptors(client: Client, broker_app: BrokerApp) -> None:
    """Clients can connect then, and a dead worker is replaced; after releases, calls succeed."""
    handles: list[Handle[torch.Tensor]] = []
    with pytest.raises(ServerBusy, match="three quarters of the 256 of the process are in use"):
        while len(handles) < FEW:
            handles.append(client.call("kept", len(handles)))
    info = client.get_server_info()["descriptors"]
    assert FULL - 32 < info["used"] < FULL + 16 and info["limit"] == FEW
    (pid,) = worker_pids(client)
    os.kill(pid, signal.SIGKILL)
    another_worker(client, pid)
    client.release_many(handles[:10])
    with broker_app.connect() as another:
        assert [float(another.call("kept", n).value[0]) for n in range(9)] == [float(n) for n in range(9)]
