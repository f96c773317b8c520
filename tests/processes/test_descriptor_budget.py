"""Limits of descriptors: cached objects are evicted, further requests are refused."""

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
@provider.share(host_copy="never")
def cached(n):
    return torch.full((8,), float(n))

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


def test_cached_results_are_evicted_for_descriptors(client: Client, broker_app: BrokerApp) -> None:
    """All calls are served, the oldest results are evicted, clients can connect, and a dead worker is replaced."""
    for n in range(2 * LIMIT):
        assert client.call("cached", n)[0] == n
    with broker_app.connect() as another:
        assert another.call("cached", n)[0] == n
    info = client.get_server_info()
    assert FULL - 32 < info["descriptors"]["used"] < FULL + 16 and info["descriptors"]["limit"] == LIMIT
    assert (info["objects"] > LIMIT // 2, info["builds"]) == (True, 2 * LIMIT)
    (pid,) = worker_pids(client)
    os.kill(pid, signal.SIGKILL)
    another_worker(client, pid)
    assert client.call("cached", 10_000)[0] == 10_000


def test_held_results_exhaust_descriptors(client: Client) -> None:
    """The error names the largest holder; after releases, calls succeed."""
    handles: list[Handle[torch.Tensor]] = []
    with pytest.raises(ServerBusy) as caught:
        while len(handles) < LIMIT:
            handles.append(client.call("kept", len(handles)))
    assert f"pid {os.getpid()} holds the most, {len(handles)}" in str(caught.value)
    client.release_many(handles[:10])
    assert [float(client.call("kept", n).value[0]) for n in range(9)] == [float(n) for n in range(9)]
