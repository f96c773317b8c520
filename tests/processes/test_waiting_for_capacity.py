"""Servers whose devices are full: requests wait for capacity in order, and time out with a list of its holders."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.errors import ConfigurationError, ServerBusy, TaskCancelled
from shared_rpc.memory.devices import device_id, facts_of
from shared_rpc.protocol import tiers as t
from tests.kit.apps import Connect
from tests.kit.processes import eventually
from tests.kit.raw import HoldingSession

#: The device first: resources that its driver opens once are no leak.
pytestmark = pytest.mark.usefixtures("device", "no_leaks")

#: Seconds of a request that is to wait in vain.
SHORTLY = 1.0


@pytest.fixture
def unit(device: str) -> int:
    """The size in bytes of the device's smallest segment."""
    return facts_of(device_id(device)).granularity


@pytest.fixture
def builds() -> list[int]:
    """The numbers of the built models."""
    return []


@pytest.fixture
def shared(base_path: str, device: str, builds: list[int]) -> Provider:
    """Models of the requested size in bytes."""
    provider = Provider(base_path, device=device)

    def build(number: int, nbytes: int) -> torch.Tensor:
        builds.append(number)
        return torch.full((nbytes,), number, dtype=torch.uint8, device=device)

    provider.share("model", managed=True)(build)
    provider.share("dropped", managed=True, host_copy="never")(build)
    provider.share("line", managed=True, concurrency="serialized")(build)

    return provider


class Full:
    """A server whose device is soon full, its clients, and requests that wait for capacity."""

    def __init__(self, shared: Provider, unit: int, connect: Connect, threads: ThreadPoolExecutor, stack: ExitStack) -> None:
        self.device = device_id(str(shared.device))
        self._shared, self._unit, self._connect, self._threads, self._stack = shared, unit, connect, threads, stack

    def start(self, units: int, clients: int = 1, **options: Any) -> list[Client]:
        """Serve with capacity for this many of the smallest segments; make some clients."""
        options = {"quotas": {self.device: units * self._unit}, "when_full": "evict", **options}
        self.server = self._stack.enter_context(Server(self._shared, **options))
        return [self.client() for _ in range(clients)]

    def client(self, **options: Any) -> Client:
        """Make a client."""
        return self._connect(device=self._shared.device, **options)

    def session(self) -> HoldingSession:
        """Make a session that sends arbitrary messages."""
        return self._stack.enter_context(HoldingSession(self.server.socket_path))

    def waiting(self) -> int:
        """Return the number of requests that wait for capacity."""
        return self.server.engine.ask(lambda core: len(core.capacity))

    def ask(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call in a thread, and return when the request waits for capacity."""
        before = self.waiting()
        answer = self._threads.submit(function, *args)
        eventually(lambda: self.waiting() > before or answer.done())
        assert not answer.done(), answer.exception() or "it did not wait"
        return answer

    def used(self) -> int:
        """Return the bytes of the device that objects use, or that are reserved for them."""
        with self.client() as client:
            return next(info["used"] for info in client.list_devices() if info["id"] == self.device)


@pytest.fixture
def full(shared: Provider, unit: int, connect: Connect, threads: ThreadPoolExecutor) -> Iterator[Full]:
    """A server, not started yet."""
    with ExitStack() as stack:
        yield Full(shared, unit, connect, threads, stack)


def test_the_error_of_a_deadline_names_who_holds_what(full: Full, unit: int) -> None:
    """With processes, objects, bytes and the remedy; nothing of the request is left."""
    [holder], client = full.start(2), full.client(timeout=SHORTLY)
    with holder.call("model", 1, 2 * unit) as handle:
        for request in (lambda: client.call("model", 2, unit), lambda: client.create_buffer(unit)):
            with pytest.raises(ServerBusy) as caught:
                request()
            text = str(caught.value)
            assert f"{unit} bytes on {full.device} wait for capacity: {2 * unit} is the quota" in text
            assert f"{2 * unit} bytes are object {handle.object_id} of model(), which pid {os.getpid()} uses" in text
            assert "Suspend or release" in text
        assert full.waiting() == 0 and full.used() == 2 * unit and len(holder.list_objects()) == 1


def test_builds_that_wait_for_capacity_can_be_abandoned(full: Full, unit: int) -> None:
    """The endpoint does not run; the next run of a serialized endpoint begins."""
    [holder], client = full.start(2), full.client(timeout=SHORTLY)
    client.call("line", 1, 2 * unit).release()
    with holder.call("model", 2, unit):
        with pytest.raises(ServerBusy):
            client.call("line", 1, 2 * unit)
        with client.call("line", 3, unit) as handle:
            assert handle.value[0].item() == 3
    assert full.waiting() == 0


def test_waiting_tasks_report_the_capacity(full: Full, unit: int) -> None:
    """And its holders; without a deadline they wait until there is capacity."""
    holder, client = full.start(1, 2)
    client.call("dropped", 2, unit).release()
    handle = holder.call("model", 1, unit)
    task_id = client.submit("dropped", 2, unit)
    eventually(lambda: full.waiting() == 1)
    info = client.get_task_status(task_id)
    assert info.status == "pending"
    assert f"{unit} bytes on {full.device} wait for capacity: {unit} is the quota" in str(info.waits_for)
    assert f"{unit} bytes are object {handle.object_id} of model(), which pid {os.getpid()} uses" in str(info.waits_for)
    handle.release()
    with client.wait_for_task(task_id) as result:
        assert result.value[0].item() == 2
        assert client.get_task_status(task_id).waits_for is None


@pytest.mark.parametrize("endpoint", ["dropped", "model"])
def test_waiting_tasks_are_cancelled_at_once(full: Full, unit: int, tmp_path: Path, endpoint: str) -> None:
    """Whether they wait for a build or for a restore."""
    [client] = full.start(1, spill_dir=str(tmp_path))
    client.call(endpoint, 2, unit).release()
    with client.call("model", 1, unit) as first:
        task_id = client.submit(endpoint, 2, unit)
        eventually(lambda: full.waiting() == 1)
        assert client.cancel_task(task_id)
        assert client.get_task_status(task_id).status == "cancelled"
        assert full.waiting() == 0
        with pytest.raises(TaskCancelled):
            client.wait_for_task(task_id)
        assert client.get_object_info(first.object_id)["tier"] == "device"


def test_a_server_that_refuses_does_so_at_once(full: Full, unit: int) -> None:
    """Like the default: cached objects without holders are dropped, and nothing waits."""
    full.start(1, when_full="refuse")
    client = full.client(timeout=None)
    client.call("model", 1, unit).release()
    with client.call("model", 2, unit) as handle:
        for request in (lambda: client.call("model", 3, unit), lambda: client.create_buffer(unit)):
            with pytest.raises(ServerBusy, match=f"{unit} bytes .*quota .* is {unit}, and {unit}"):
                request()
        assert full.waiting() == 0 and [info["object_id"] for info in client.list_objects()] == [handle.object_id]


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
        full.start(1, **options)


# With a lower tier.


def made(client: Client, number: int, nbytes: int) -> str:
    """Return the id of a cached model without holders."""
    with client.call("model", number, nbytes) as handle:
        return str(handle.object_id)


def test_suspended_objects_are_evicted_and_resumed(full: Full, tmp_path: Path, unit: int) -> None:
    """Evicted for another request; the resuming session waits for capacity."""
    [client], session = full.start(1, spill_dir=tmp_path), full.session()
    object_id = made(client, 1, unit)
    session.hold(object_id)
    session.suspend(object_id)
    with client.call("model", 2, unit):
        assert client.get_object_info(object_id)["tier"] != "device"
        session.begin_resume(object_id)
        eventually(lambda: full.waiting() == 1)
    assert isinstance(session.heard(), t.Resumed)
    assert client.get_object_info(object_id)["tier"] == "device"


def test_calls_wait_for_a_restore(full: Full, builds: list[int], tmp_path: Path, unit: int) -> None:
    """Instead of building again."""
    client, holder = full.start(1, 2, spill_dir=tmp_path)
    made(client, 1, unit)
    second = holder.call("model", 2, unit)
    answer = full.ask(client.call, "model", 1, unit)
    second.release()
    with answer.result(30) as first:
        assert first.value.unique().tolist() == [1] and builds == [1, 2]


def test_calls_of_running_endpoints_go_first(
    full: Full,
    shared: Provider,
    threads: ThreadPoolExecutor,
    begun: threading.Event,
    go: threading.Event,
    tmp_path: Path,
    unit: int,
) -> None:
    """Others may wait for memory that the endpoint uses: it is not blocked by them, for warm and cold objects."""

    @shared.share(managed=True)
    def both(nbytes: int) -> torch.Tensor:
        with shared.call("model", 1, nbytes) as first:
            begun.set()
            go.wait(30)
            with shared.call("model", 2, nbytes) as second:
                return first.value + second.value

    [client] = full.start(3, spill_dir=tmp_path)
    for number in (1, 2, 3):
        made(client, number, unit)
    client.evict(made(client, 2, unit))
    built = threads.submit(client.call, "both", unit)
    begun.wait(30)
    large = full.ask(full.client().create_buffer, 3 * unit)
    go.set()
    large.result(30).release()
    with built.result(30) as handle:
        assert handle.value.unique().tolist() == [3]
