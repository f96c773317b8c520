"""Limits of descriptors: further objects are refused."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from shared_rpc import Client, Handle
from shared_rpc.errors import ServerBusy
from tests.kit.brokers import BrokerApp, another_worker, worker_pids

#: Descriptors that a server may have in these tests, and the number of open ones at which no object gets another.
LIMIT, FULL = 256, 192

ENDPOINTS = """
@provider.share(managed=True, cache=False, host_copy="never")
def kept(n):
    return torch.full((8,), float(n))
"""

LIMITED = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
"""


@pytest.fixture
def client(broker_app: BrokerApp) -> Client:
    """A client of a broker with few descriptors."""
    broker_app.write(ENDPOINTS)
    broker_app.start_program(broker_app.program(LIMITED))
    return broker_app.connect()


def test_objects_exhaust_descriptors(client: Client, broker_app: BrokerApp) -> None:
    """Clients can connect then, and a dead worker is replaced; after releases, calls succeed."""
    handles: list[Handle[torch.Tensor]] = []
    with pytest.raises(ServerBusy, match="three quarters of the 256 of the process are in use"):
        while len(handles) < LIMIT:
            handles.append(client.call("kept", len(handles)))
    info = client.get_server_info()["descriptors"]
    assert FULL - 32 < info["used"] < FULL + 16 and info["limit"] == LIMIT
    (pid,) = worker_pids(client)
    os.kill(pid, signal.SIGKILL)
    another_worker(client, pid)
    client.release_many(handles[:10])
    with broker_app.connect() as another:
        assert [float(another.call("kept", n).value[0]) for n in range(9)] == [float(n) for n in range(9)]
