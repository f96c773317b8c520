"""Limits of descriptors: cached objects are evicted, further requests are refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from shared_rpc import Client, Handle, errors
from tests.kit.brokers import BrokerApp, another_worker, worker_pids
from tests.kit.processes import Child

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
def served(broker_app: BrokerApp) -> Child:
    """The endpoints, served by a process with few descriptors."""
    broker_app.write(ENDPOINTS)
    return broker_app.start_program(broker_app.program(LIMITED))


@pytest.fixture
def client(served: Child, broker_app: BrokerApp) -> Iterator[Client]:
    """A client of the server."""
    with broker_app.connect() as client:
        yield client


def holding(client: Client, name: str = "kept") -> tuple[list[Handle], errors.ServerBusy]:
    """Call until the server refuses; return the results and the error."""
    handles: list[Handle] = []
    with pytest.raises(errors.ServerBusy) as caught:
        while len(handles) < LIMIT:
            handles.append(client.call(name, len(handles)))
    return handles, caught.value


def test_cached_results_are_evicted_for_descriptors(served: Child, client: Client, broker_app: BrokerApp) -> None:
    """All calls are served, the oldest results are evicted, and clients can always connect."""
    for n in range(2 * LIMIT):
        assert client.call("cached", n)[0] == n
        if n % LIMIT == LIMIT - 1:
            with broker_app.connect() as another:
                assert another.call("cached", n)[0] == n
    info = client.get_server_info()
    assert FULL - 32 < info["descriptors"]["used"] < FULL + 16 and info["descriptors"]["limit"] == LIMIT
    assert info["objects"] > LIMIT // 2
    builds = info["builds"]
    assert client.call("cached", 2 * LIMIT - 1)[0] == 2 * LIMIT - 1
    assert client.get_server_info()["builds"] == builds


def test_held_results_exhaust_descriptors(client: Client) -> None:
    """The error names the largest holder; after releases, calls succeed."""
    handles, error = holding(client)
    assert f"pid {os.getpid()} holds the most, {len(handles)}" in str(error)
    client.release_many(handles[:10])
    assert [float(client.call("kept", n).value[0]) for n in range(9)] == [float(n) for n in range(9)]


def test_a_dead_worker_is_replaced_at_the_limit(client: Client) -> None:
    """The broker reserves some descriptors for that."""
    for n in range(2 * LIMIT):
        client.call("cached", n)
    (pid,) = worker_pids(client)
    os.kill(pid, signal.SIGKILL)
    another_worker(client, pid)
    assert client.call("cached", 10_000)[0] == 10_000
