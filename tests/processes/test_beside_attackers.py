"""One client exhausts all that it can while others are served: the broker loses no object."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shared_rpc import Client, Handle
from tests.kit import attacker
from tests.kit.attacker import Bystander
from tests.kit.brokers import BrokerApp
from tests.kit.processes import Child, eventually

#: Descriptors that the broker may have.
LIMIT = 1024
#: Seconds that the bystander may wait on a machine with other work; without the limits it waits for up to a minute.
PATIENCE = 15.0
#: Bytes that the broker may take besides its objects.
MEMORY = 256 << 20

LIMITED = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
"""

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
        self.broker: Child = app.start_program(app.program(LIMITED))
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
    served.client.close()


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
    eventually(lambda: served.client.get_server_info()["connections"] == 1)
