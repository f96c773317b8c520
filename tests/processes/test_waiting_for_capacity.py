"""Servers whose devices are full: requests wait for capacity in order, and time out with a list of its holders."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Client, Server
from shared_rpc.errors import CapabilityError, ConfigurationError, ServerBusy, TaskCancelled
from shared_rpc.execution import device_memory
from shared_rpc.memory.backends.host import MemfdBackend
from shared_rpc.memory.closing import CLOSER
from shared_rpc.memory.devices import device_id, facts_of
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m
from tests.kit.closings import late_closings
from tests.kit.deep import repetitions
from tests.kit.processes import eventually
from tests.kit.raw import HoldingSession, Raw
from tests.kit.world import World

#: The device first: resources that its driver opens once are no leak.
pytestmark = pytest.mark.usefixtures("device")

on_the_host = pytest.mark.parametrize("device", ["cpu"], indirect=True)

#: Seconds of a request that is to wait in vain.
SHORTLY = 1.0


@pytest.fixture
def unit(device: str) -> int:
    """The size in bytes of the device's smallest segment."""
    return facts_of(device_id(device)).granularity


@pytest.fixture
def world(device: str, world: World) -> World:
    """Models of the requested size in bytes."""

    def build(number: int, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), number, dtype=torch.uint8, device=device)

    world.share("model", managed=True)(build)
    world.share("dropped", managed=True, host_copy="never")(build)
    world.share("line", managed=True, concurrency="serialized")(build)
    return world


#: ``full(units, **options)`` serves with capacity for this many of the smallest segments.
Full = Callable[..., Server]


@pytest.fixture
def full(world: World, device: str, unit: int) -> Full:
    """See :data:`Full`."""
    return lambda units, **options: world.serve(**{"quotas": {device: units * unit}, "when_full": "evict", **options})


def waiting(server: Server) -> int:
    """Return the number of requests that wait for capacity."""
    return server.engine.ask(lambda core: len(core.capacity))


def used(client: Client, device: str) -> int:
    """Return the bytes of a device that objects use, or that are reserved for them."""
    return next(info["used"] for info in client.list_devices() if info["id"] == device_id(device))


def test_errors_of_deadlines_name_the_holders(full: Full, client: Client, world: World, device: str, unit: int) -> None:
    """With processes, objects, bytes and the remedy; nothing of the request is left."""
    server, hasty = full(2), world.client(timeout=SHORTLY)
    with client.call("model", 1, 2 * unit) as handle:
        for request in (lambda: hasty.call("model", 2, unit), lambda: hasty.create_buffer(unit)):
            with pytest.raises(ServerBusy) as caught:
                request()
            text = str(caught.value)
            assert f"{unit} bytes on {device_id(device)} wait for capacity: {2 * unit} is the quota" in text
            assert f"{2 * unit} bytes are object {handle.object_id} of model(), which pid {os.getpid()} uses" in text
            assert "Suspend or release" in text
        assert (waiting(server), used(client, device), len(client.list_objects())) == (0, 2 * unit, 1)


def test_results_that_wait_for_capacity_can_be_abandoned(
    full: Full, client: Client, world: World, device: str, unit: int
) -> None:
    """And the next run of a serialized endpoint begins."""
    server, hasty = full(2), world.client(timeout=SHORTLY)
    client.call("line", 1, 2 * unit).release()
    with client.call("model", 2, unit):
        with pytest.raises(ServerBusy):
            hasty.call("line", 1, 2 * unit)
        with hasty.call("line", 3, unit) as handle:
            assert handle.value[0].item() == 3
    assert waiting(server) == 0


def test_refused_results_are_unmapped(full: Full, client: Client, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another call of the endpoint: a GPU's memory, which is not unmapped in the background, would stay."""
    monkeypatch.setattr(MemfdBackend, "unmaps_in_background", False)
    full(1)
    before = len(MAPPINGS)
    with pytest.raises(CapabilityError, match="more than the quota"):
        client.call("model", 1, 2 * unit)
    eventually(lambda: len(MAPPINGS) == before)


def test_waiting_tasks_report_the_capacity(full: Full, client: Client, device: str, unit: int) -> None:
    """And its holders; without a deadline they wait until there is capacity."""
    server = full(1)
    client.call("dropped", 2, unit).release()
    handle = client.call("model", 1, unit)
    task_id = client.submit("dropped", 2, unit)
    eventually(lambda: waiting(server) == 1)
    info = client.get_task_status(task_id)
    assert info.status == "running"
    assert f"{unit} bytes on {device_id(device)} wait for capacity: {unit} is the quota" in str(info.waits_for)
    assert f"{unit} bytes are object {handle.object_id} of model(), which pid {os.getpid()} uses" in str(info.waits_for)
    handle.release()
    with client.wait_for_task(task_id) as result:
        assert result.value[0].item() == 2
        assert client.get_task_status(task_id).waits_for is None


@pytest.mark.parametrize("endpoint", ["dropped", "model"])
def test_waiting_tasks_are_cancelled_at_once(full: Full, client: Client, unit: int, tmp_path: Path, endpoint: str) -> None:
    """Whether they wait for a build or for a restore."""
    server = full(1, spill_dir=str(tmp_path))
    client.call(endpoint, 2, unit).release()
    with client.call("model", 1, unit) as first:
        task_id = client.submit(endpoint, 2, unit)
        eventually(lambda: waiting(server) == 1)
        assert client.cancel_task(task_id)
        assert client.get_task_status(task_id).status == "cancelled"
        eventually(lambda: waiting(server) == 0, what="its request has left the queue, in the next turn of the loop")
        with pytest.raises(TaskCancelled):
            client.wait_for_task(task_id)
        assert client.get_object_info(first.object_id)["tier"] == "device"


def test_calls_join_a_waiting_result(
    full: Full, client: Client, world: World, threads: ThreadPoolExecutor, device: str, unit: int
) -> None:
    """It is built once, even if the client that asked first has ended."""
    server, other = full(1), world.client()
    first = other.call("model", 1, unit)
    answer = threads.submit(client.call, "model", 2, unit)
    eventually(lambda: waiting(server) == 1)
    joined = threads.submit(other.call, "model", 2, unit)
    eventually(lambda: server.engine.ask(lambda core: sum(len(run.waiters) for run in core.runs.calls)) == 2)
    client.close()
    assert answer.exception(30) is not None
    first.release()
    with joined.result(30):
        assert other.get_server_info()["builds"] == 2


def test_a_stopping_server_refuses_waiting_requests(full: Full, client: Client, threads: ThreadPoolExecutor, unit: int) -> None:
    """For results and for buffers, with the reason."""
    server = full(1)
    with client.call("model", 1, unit):
        answers = [threads.submit(client.call, "model", 2, unit), threads.submit(client.create_buffer, unit)]
        eventually(lambda: waiting(server) == 2)
        server.stop()
        for answer in answers:
            assert "was stopped before" in str(answer.exception(30))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"when_full": "wait"}, "when_full='wait': use 'evict' or 'refuse'"),
        ({"quotas": {}}, "when_full='evict' needs a quota"),
        ({"host_quota": 1.5}, "host_quota=1.5: use bytes as an int, or a fraction"),
        ({"quotas": {"GPU-1": 5}}, "use a device of this server"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(full: Full, options: dict[str, Any], text: str) -> None:
    """The server does not start, and gives the reason."""
    with pytest.raises(ConfigurationError, match=text):
        full(1, **options)


def test_calls_of_running_endpoints_go_first(
    full: Full,
    world: World,
    client: Client,
    threads: ThreadPoolExecutor,
    begun: threading.Event,
    go: threading.Event,
    tmp_path: Path,
    unit: int,
) -> None:
    """Others may wait for memory that the endpoint uses: it is not blocked by them, for warm and cold objects."""

    @world.share(managed=True)
    def both(nbytes: int) -> torch.Tensor:
        with world.provider.call("model", 1, nbytes) as first:
            begun.set()
            go.wait(30)
            with world.provider.call("model", 2, nbytes) as second:
                return first.value + second.value

    server = full(3, spill_dir=tmp_path)
    for number in (1, 3, 2):
        client.call("model", number, unit).release()
    client.evict(client.list_objects()[-1]["object_id"])
    built = threads.submit(client.call, "both", unit)
    begun.wait(30)
    large = threads.submit(client.create_buffer, 3 * unit)
    eventually(lambda: waiting(server) == 1)
    go.set()
    large.result(30).release()
    with built.result(30) as handle:
        assert handle.value.unique().tolist() == [3]


def hold(client: Client, session: HoldingSession, number: int, nbytes: int) -> str:
    """Have a session acquire a model; return the object's id."""
    with client.call("model", number, nbytes) as handle:
        session.hold(handle.object_id)
    return str(handle.object_id)


@on_the_host
def test_many_sessions_take_turns_on_two_models(full: Full, client: Client, tmp_path: Path, unit: int) -> None:
    """With memory for one: all make progress, and find the right bytes each time."""
    full(1, spill_dir=str(tmp_path))
    count = repetitions(6, 50)

    def take_turns(order: int) -> None:
        with HoldingSession(client.socket_path, 300.0) as session:
            models = []
            for number in (1, 2):
                models.append((number, hold(client, session, number, unit)))
                session.suspend(models[-1][1])
            for _ in range(4):
                for number, object_id in models[::order]:
                    assert session.resume(object_id) == {number}
                    session.suspend(object_id)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(take_turns, [1, -1] * (count // 2)))
    infos = client.list_objects()
    assert sorted(info["cache_key"] for info in infos) == [f"model(number={number}, nbytes={unit})" for number in (1, 2)]
    assert sorted(info["tier"] for info in infos) == ["device", "file"] and not any(info["active"] for info in infos)
    assert used(client, "cpu") == unit


@on_the_host
def test_the_end_of_a_session_ends_its_use_and_its_requests(
    full: Full, client: Client, threads: ThreadPoolExecutor, unit: int
) -> None:
    """A waiter gets the memory that a killed process used; one that was killed itself is removed from the queue."""
    server = full(1)
    with HoldingSession(server.socket_path) as session, Raw(server.socket_path) as waiter:
        hold(client, session, 1, unit)
        waiter.say(m.Call("model", [2, unit]))
        eventually(lambda: waiting(server) == 1)
        answer = threads.submit(client.call, "model", 3, unit)
        eventually(lambda: waiting(server) == 2)
        waiter.close()
        eventually(lambda: waiting(server) == 1)
    with answer.result(30) as handle:
        assert handle.value[0].item() == 3


# Memory that was dropped, and is being freed by another thread.


#: Bytes of memory that another thread closes.
LARGE = 2 << 20


def close_on_request(monkeypatch: pytest.MonkeyPatch, go: threading.Event) -> None:
    """Let memory be freed when something waits for it."""
    notify = CLOSER.notify
    monkeypatch.setattr(CLOSER, "notify", lambda freed: (go.set(), notify(freed)))


def test_quotas_count_dropped_memory_as_free(full: Full, client: Client, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request is admitted once an object is dropped; on a GPU it waits for the actual free."""
    full(1, when_full="refuse", quotas={device: LARGE})
    held = client.create_buffer(LARGE)
    with pytest.raises(ServerBusy):
        client.create_buffer(LARGE)
    with late_closings() as go:
        close_on_request(monkeypatch, go)
        held.release()
        eventually(lambda: len(CLOSER) == 1)
        with client.create_buffer(LARGE) as buffer:
            assert buffer.value.shape == (LARGE,)
            assert go.is_set() == (device != "cpu")


def test_builds_wait_for_pending_frees(
    full: Full, world: World, client: Client, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """If the device has less free memory than is being freed."""
    left: list[int] = []

    @world.share
    async def weights() -> torch.Tensor:
        left.append(len(CLOSER))
        return torch.zeros(4, device=device)

    full(1, when_full="refuse", quotas={})
    with late_closings() as go:
        close_on_request(monkeypatch, go)
        client.create_buffer(LARGE).release()
        eventually(lambda: len(CLOSER) == 1)
        monkeypatch.setattr(device_memory, "free_bytes", lambda device: 0)
        client.call("weights")
    assert left == [0]
