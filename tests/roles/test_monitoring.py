"""What a client asks of a server that somebody watches: sessions, runs, counters, and one object to be dropped."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server, progress
from shared_rpc.errors import ConfigurationError, EndpointNotFound, StaleHandleError
from shared_rpc.server import holdings
from tests.kit.apps import Connect, Serve
from tests.kit.brokers import BrokerApp
from tests.kit.processes import eventually


def outcome_of(call: Callable[[], object]) -> object:
    """What it returns, or raises."""
    try:
        return call()
    except Exception as error:
        return error


@pytest.fixture
def served(provider: Provider, serve: Serve, go: threading.Event) -> Server:
    """A server with a cached endpoint, and one that waits."""

    @provider.share(managed=True)
    def load(size: int) -> torch.Tensor:
        return torch.zeros(size)

    @provider.share(concurrency="serialized")
    def gated(key: int) -> torch.Tensor:
        progress(1, 4, "shards")
        go.wait()
        return torch.zeros(1)

    return serve()


@pytest.fixture
def refreshing(
    served: Server, connect: Connect, go: threading.Event, threads: ThreadPoolExecutor
) -> tuple[Client, Future[Any]]:
    """A client, and what comes of a refresh whose build has begun and waits for ``go``."""
    client = connect()
    go.set()
    client.call("gated", 0)
    go.clear()
    refreshed = threads.submit(outcome_of, lambda: client.refresh("gated", 0))
    eventually(lambda: [run["progress"] for run in client.list_runs()] == [{"done": 1.0, "total": 4.0, "message": "shards"}])
    return client, refreshed


def test_sessions(served: Server, connect: Connect) -> None:
    """Each client's process, its connections and its leases, the asker's too."""
    holder, other = connect(), connect()
    handles = [holder.call("load", size) for size in (1, 2)]
    other.ping()

    sessions = other.list_sessions()

    assert [one["pid"] for one in sessions] == [os.getpid()] * 2
    assert sorted(one["leases"] for one in sessions) == [0, 2]
    assert all(one["connections"] == 1 and abs(time.time() - one["since"]) < 60 for one in sessions)
    del handles


def test_runs_of_calls_and_of_tasks(served: Server, connect: Connect, go: threading.Event, threads: ThreadPoolExecutor) -> None:
    """One that runs tells its progress and who waits for it; one that waits for its turn has not begun."""
    client = connect()
    task = client.submit("gated", 0)
    eventually(lambda: client.get_task_status(task).progress is not None)
    call = threads.submit(client.call, "gated", 0)
    eventually(lambda: client.list_runs()[0]["calls"] == 1)
    second = client.submit("gated", 1)

    running, pending = client.list_runs()

    assert (running["endpoint"], running["cache_key"], running["status"]) == ("gated", "gated(key=0)", "running")
    assert running["tasks"] == [task]
    assert running["progress"] == {"done": 1.0, "total": 4.0, "message": "shards"}
    assert running["created_at"] <= running["started_at"] <= time.time()
    assert (pending["status"], pending["started_at"], pending["progress"]) == ("pending", None, None)
    assert client.list_runs(limit=1)[0]["cache_key"] == "gated(key=0)"
    go.set()
    call.result(20)
    client.wait_for_task(second)
    assert client.list_runs() == []


def test_the_run_of_a_refresh(refreshing: tuple[Client, Future[Any]], go: threading.Event) -> None:
    """A refresh is no task, and its progress is seen all the same, while the present generation is served."""
    client, refreshed = refreshing

    (run,) = client.list_runs()

    assert (run["cache_key"], run["status"], run["calls"], run["tasks"]) == ("gated(key=0)", "running", 1, [])
    client.call("gated", 0)
    assert not refreshed.done()
    go.set()
    assert refreshed.result(20).generation == 2


def test_statistics(served: Server, connect: Connect) -> None:
    """What each endpoint did, and nothing of those that did nothing; totals count calls that no endpoint got."""
    client = connect()
    begin = time.monotonic()
    for size in (1, 2, 1):
        client.call("load", size)
    client.refresh("load", 1)
    with pytest.raises(EndpointNotFound):
        client.call("nowhere")
    with pytest.raises(TypeError):
        client.call("load", nothing=1)
    statistics, total = client.get_statistics(), client.get_server_info()
    assert set(statistics) == {"load"}
    load = statistics["load"]
    assert 0 < load["build_seconds"] < time.monotonic() - begin
    assert (load["calls"], load["hits"], load["builds"], load["errors"]) == (4, 1, 3, 0)
    assert (total["calls"], total["failures"]) == (6, 2)
    assert (total["cache_hits"], total["builds"], total["joined"]) == (1, 3, 0)


def test_an_object_is_invalidated_by_its_id(served: Server, connect: Connect) -> None:
    """That call is built anew, others stay, and who holds the object keeps it."""
    client = connect()
    one, other = client.call("load", 1), client.call("load", 2)

    assert client.invalidate_object(one.object_id) == 1
    assert client.invalidate_object(one.object_id) == 0

    client.ensure_handle_live(one)
    anew = client.call("load", 1)
    assert anew.object_id != one.object_id
    assert client.call("load", 2).object_id == other.object_id
    # What has taken its place is another object.
    assert client.invalidate_object(one.object_id) == 0
    assert client.call("load", 1).object_id == anew.object_id


def test_objects_of_several_pages(served: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both clients fetch all of them, however many pages they fill: a reply has room for some ten thousand."""
    monkeypatch.setattr(holdings, "_PAGE", 3)
    client = connect()
    handles = [client.call("load", size) for size in range(1, 8)]
    ids = [handle.object_id for handle in handles]
    assert [item["object_id"] for item in client.list_objects()] == ids

    async def listed() -> list[str]:
        async with AsyncClient(device="cpu", connect_timeout=0) as other:
            return [item["object_id"] for item in await other.list_objects()]

    assert asyncio.run(listed()) == ids
    for object_id in ids[:4]:
        client.invalidate_object(object_id)
        handles.pop(0).release()
    assert [item["object_id"] for item in client.list_objects()] == ids[4:]


def test_what_is_no_cached_result_is_not_invalidated(served: Server, connect: Connect) -> None:
    """The error says what it is, and what ends it."""
    client = connect()
    with pytest.raises(StaleHandleError) as unknown:
        client.invalidate_object("0" * 24)
    assert unknown.value.reason == "object_gone"
    buffer = client.create_buffer(8)
    with pytest.raises(ConfigurationError, match=r"is a buffer.*free_buffer"):
        client.invalidate_object(buffer.object_id)
    client.free_buffer(buffer)


def test_a_worker_tells_its_device_and_how_often_it_was_started_again(broker_app: BrokerApp) -> None:
    """A crash of one does not count for another."""
    broker_app.start("--worker-device", "cpu", "--workers", "2")
    client = broker_app.connect()
    before = client.get_server_info()["workers"]
    assert [(one["number"], one["device"], one["restarts"]) for one in before] == [(0, "cpu", 0), (1, "cpu", 0)]
    os.kill(before[1]["pid"], signal.SIGKILL)

    def restarts() -> list[tuple[int, int]]:
        return sorted((one["number"], one["restarts"]) for one in client.get_server_info()["workers"])

    eventually(lambda: restarts() == [(0, 0), (1, 1)], 40.0)
