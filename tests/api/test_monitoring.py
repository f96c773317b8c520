"""Requests of monitoring clients: sessions, runs, counters, and dropping an object."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared_rpc import Client, Progress, progress
from shared_rpc.errors import ConfigurationError, EndpointNotFound, StaleHandleError
from tests.kit.brokers import BrokerApp
from tests.kit.processes import eventually
from tests.kit.world import World


@pytest.fixture
def world(world: World, go: threading.Event) -> World:
    """A server with a cached endpoint, and one that waits."""
    world.share("load", managed=True)(lambda size: torch.zeros((size,)))

    @world.share(concurrency="serialized")
    def gated(key: int) -> torch.Tensor:
        progress(1, 4, "shards")
        go.wait()
        return torch.zeros(1)

    return world


def test_runs_of_calls_and_tasks_are_listed(client: Client, go: threading.Event, threads: ThreadPoolExecutor) -> None:
    """A running one with its progress and waiters; a queued one as not begun."""
    task = client.submit("gated", 0)
    eventually(lambda: client.get_task_status(task).progress is not None)
    call = threads.submit(client.call, "gated", 0)
    eventually(lambda: client.list_runs()[0]["calls"] == 1)
    second = client.submit("gated", 1)

    running, pending = client.list_runs()

    assert (running["endpoint"], running["cache_key"], running["status"]) == ("gated", "gated(key=0)", "running")
    assert running["tasks"] == [task]
    assert running["progress"] == Progress(1.0, 4.0, "shards")
    assert running["created_at"] <= running["started_at"] <= time.time()
    assert (pending["status"], pending["started_at"], pending["progress"]) == ("pending", None, None)
    assert client.list_runs(limit=1)[0]["cache_key"] == "gated(key=0)"
    go.set()
    call.result(20)
    client.wait_for_task(second)
    assert client.list_runs() == []


def test_statistics_count_by_endpoint(client: Client) -> None:
    """Without unused endpoints; totals include calls that reached none."""
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


def test_objects_are_invalidated_by_id(client: Client) -> None:
    """That call is built again, others are not, and holders keep the object."""
    one, other = client.call("load", 1), client.call("load", 2)
    assert [client.invalidate_object(one.object_id) for _ in range(2)] == [1, 0]
    client.ensure_handle_live(one)
    assert client.call("load", 1).object_id != one.object_id
    assert client.call("load", 2).object_id == other.object_id


def test_other_objects_are_not_invalidated(client: Client) -> None:
    """The error names the kind of object, and how to end it."""
    with pytest.raises(StaleHandleError) as unknown:
        client.invalidate_object("0" * 24)
    assert unknown.value.reason == "object_gone"
    buffer = client.create_buffer(8)
    with pytest.raises(ConfigurationError, match=r"is a buffer.*free_buffer"):
        client.invalidate_object(buffer.object_id)
    client.free_buffer(buffer)


def test_workers_have_a_device_and_restarts(broker_app: BrokerApp) -> None:
    """A crash of one does not count for another."""
    client = broker_app.serve(options={"devices": ("cpu",), "workers": 2})
    before = client.get_server_info()["workers"]
    assert [(one["number"], one["device"], one["restarts"]) for one in before] == [(0, "cpu", 0), (1, "cpu", 0)]
    os.kill(before[1]["pid"], signal.SIGKILL)

    def restarts() -> list[tuple[int, int]]:
        return sorted((one["number"], one["restarts"]) for one in client.get_server_info()["workers"])

    eventually(lambda: restarts() == [(0, 0), (1, 1)], 40.0)


# Holders of an object.


def test_holders_are_processes_until_killed(client: Client, world: World) -> None:
    """With process id, handles and start time, like their sessions; a killed one is no longer listed."""
    holder = world.peer("handles = [client.call('load', 4), client.call('load', 4)]")
    handle = client.call("load", 4)
    mine, other = sorted(client.holders(handle), key=lambda one: one["pid"] != os.getpid())
    assert (mine["pid"], mine["leases"]) == (os.getpid(), 1)
    assert (other["pid"], other["leases"]) == (holder.pid, 2)
    sessions = {one["session"]: (one["pid"], one["since"], one["leases"]) for one in client.list_sessions()}
    assert sessions == {one["session"]: (one["pid"], one["since"], 1) for one in (mine, other)}
    assert all(abs(time.time() - one["since"]) < 60 for one in (mine, other))
    holder.kill()
    eventually(lambda: client.holders(handle.object_id) == [mine])


def test_unfetched_tasks_are_holders(client: Client) -> None:
    """By the task's id."""
    task = client.submit("load", 4)
    (holder,) = client.holders(client.watch_task(task).object_id or "")
    assert (holder["kind"], holder["session"], holder["since"]) == ("task", task, None)
