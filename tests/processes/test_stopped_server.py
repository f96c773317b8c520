"""Clients of a stopped server, as under a debugger: the limits of their waits, and their later calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.client.exchange import PROMPT
from shared_rpc.errors import DeadlineExceeded
from tests.kit.brokers import BrokerApp
from tests.kit.processes import Child, eventually, sigstop


@pytest.fixture
def server(no_leaks: None, broker_app: BrokerApp) -> Child:
    """A server of another process."""
    return broker_app.start("--in-process")


def leases(client: Client) -> int:
    """Return the leases on objects of a server."""
    return client.get_server_info()["leases"]


def test_dropped_handles_delay_no_other(server: Child, broker_app: BrokerApp, base_path: str) -> None:
    """A lease of another server ends at once, and that of the stopped one when it continues."""
    provider = Provider(f"{base_path}-other", device="cpu")
    provider.share("held", managed=True)(lambda: torch.ones(3))
    stopped = broker_app.connect()
    with Server(provider), Client(f"{base_path}-other", device="cpu") as other:
        first, second, third = stopped.call("held"), stopped.call("held"), other.call("held")
        sigstop(server.pid)
        del first, second, third
        eventually(lambda: leases(other) == 0, seconds=60)
    os.kill(server.pid, signal.SIGCONT)
    eventually(lambda: leases(stopped) == 0, seconds=60)


@pytest.mark.parametrize("operation", [Client.ping, lambda client: client.on_refresh(print)], ids=["ping", "subscription"])
def test_client_timeouts_hold(server: Child, broker_app: BrokerApp, operation: Callable[[Client], object]) -> None:
    """An operation ends soon after its timeout, although the server does not confirm the cancellation."""
    client = broker_app.connect(timeout=0.5)
    client.ping()
    sigstop(server.pid)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        operation(client)
    assert time.monotonic() - begin < PROMPT
    os.kill(server.pid, signal.SIGCONT)
