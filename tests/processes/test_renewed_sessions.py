"""Reconnected clients whose objects moved to other tiers before the next session renewed their leases."""

from __future__ import annotations

import functools
import inspect
import logging
import mmap
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch

from shared_rpc import AsyncClient, AsyncHandle, Client, Handle, Provider
from shared_rpc.client import asynchronous, blocking
from shared_rpc.client.base import Turn
from shared_rpc.client.results import ReceivedResult, rebuild
from shared_rpc.client.steps import Step, Work, drive
from shared_rpc.client.suspension import awakened
from shared_rpc.errors import ConnectionClosed, HandleSuspended, ServerBusy
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.operations import binding
from tests.kit.apps import Connect, Serve
from tests.kit.brokers import BrokerApp, module_broker
from tests.kit.deep import deep, repetitions
from tests.kit.interrupting import Interrupted, interrupted_at, points_of, raising_handler
from tests.kit.processes import Child, eventually, python
from tests.kit.suspending import APP, SIZE, has_numbers

#: Bytes of an object, in pages.
CAPACITY = -(-SIZE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
#: Options of a server for one object, whose requests wait for capacity.
EVICTS = f"--quota cpu={CAPACITY} --when-full evict --spill-dir {{}}"

#: Adds one to everything, and does so again on command.
WRITER = """
import sys
from shared_rpc import Client
with Client(device="cpu") as client, client.call("load") as handle:
    for line in sys.stdin:
        handle.value.add_(1)
        print("written, to", handle.value[0].item(), flush=True)
"""


def break_off(client: Client | AsyncClient) -> None:
    """Break the connection of a client, without a close on either side."""
    link = client._link
    assert link is not None, "the client is not connected"
    link._socket.sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerApp]:
    """A server of another process, with capacity for two objects, which evicts to files on request."""
    options = ("--spill-dir", str(directory := tmp_path_factory.mktemp("served")), "--quota", f"cpu={2 * CAPACITY}")
    with module_broker(directory, APP, *options) as served:
        yield served


@pytest.fixture
def client(broker: BrokerApp) -> Client:
    """A client of it that loses its sessions."""
    return broker.connect()


@pytest.fixture
def other(broker: BrokerApp) -> Client:
    """A client that moves objects, and holds none."""
    return broker.connect()


@pytest.fixture
def writer(children: list[Child]) -> Callable[[], Child]:
    """Starts a process that writes to the object on command."""

    def start() -> Child:
        children.append(python(WRITER))
        return children[-1]

    return start


def lose(other: Client, object_id: str, *clients: Client | AsyncClient) -> None:
    """Break all connections of the holders of an object, and wait until the server has detected it."""
    for client in clients:
        break_off(client)
    eventually(lambda: state(other, object_id)[1] == 0)


def evict(other: Client, object_id: str) -> None:
    """Evict one object to a file."""
    (moved,) = other.evict(object_id)
    assert moved["tier"] == "file"


def lose_and_evict(other: Client, handle: Handle[Any] | AsyncHandle[Any], client: Client | AsyncClient) -> None:
    """Break the client's connection, and evict its object to a file in the meantime."""
    lose(other, handle.object_id, client)
    evict(other, handle.object_id)


def write(other: Client, *args: int) -> None:
    """Add one to the contents of an object, for all its holders."""
    with other.call("load", *args) as theirs:
        theirs.value.add_(1)


def state(other: Client, object_id: str) -> tuple[str, int, int]:
    """Return an object's tier, and the numbers of sessions that hold it and that have it active."""
    info = other.get_object_info(object_id)
    return info["tier"], info["leases"], info["active"]


def mapped(handle: Handle[Any]) -> list[str]:
    """Return the ids of an object's segments that this process has mapped."""
    return [mapping.info.id for mapping in MAPPINGS.of_objects({handle.object_id}).get(handle.object_id, [])]


@pytest.mark.parametrize(
    ("endpoint", "restored"),
    [("load", True), ("load", False), ("load_read_only", True), *deep(("load_list", False))],
)
def test_active_handles_get_the_present_memory(client: Client, other: Client, endpoint: str, restored: bool) -> None:
    """At the same address, without the earlier memory; the object is not evicted any more."""
    handle = client.call(endpoint)
    value = handle.value[0] if endpoint == "load_list" else handle.value
    address, view, others = value.data_ptr(), value[9:], len(MAPPINGS)
    (first,) = mapped(handle)
    seen = {first}
    for _ in range(2):
        lose_and_evict(other, handle, client)
        if restored:
            other.restore(handle.object_id)
        client.ping()
        assert state(other, handle.object_id) == ("device", 1, 1)
        assert (value.data_ptr(), has_numbers(value), torch.equal(view, torch.arange(9, SIZE))) == (address, True, True)
        (present,) = mapped(handle)
        assert (present in seen, present.partition(".")[0], handle.suspended, len(MAPPINGS)) == (False, first, False, others)
        seen.add(present)
        with pytest.raises(ServerBusy, match="in use by pid"):
            other.evict(handle.object_id)


def test_processes_share_writes_after_a_renewal(
    client: Client, other: Client, writer: Callable[[], Child], caplog: pytest.LogCaptureFixture
) -> None:
    """After the first one's session was lost; its writes in between are lost, with a warning."""
    handle = client.call("load")
    value = handle.value
    lose_and_evict(other, handle, client)
    second = writer()
    second.tell("write")
    assert second.expect("written") == "written, to 1"
    value.fill_(100)
    with caplog.at_level(logging.INFO, "shared_rpc"):
        client.ping()
    assert torch.equal(value, torch.arange(SIZE) + 1)
    value.add_(10)
    second.tell("write")
    assert second.expect("written") == "written, to 12"
    assert value[0] == 12
    (record,) = [record for record in caplog.records if handle.object_id in record.message]
    assert record.levelno == logging.WARNING and "what this process wrote to it since is lost" in record.message


def test_read_only_memory_is_replaced_without_a_warning(
    client: Client, other: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the same bytes: nothing is lost."""
    handle = client.call("load_read_only")
    lose_and_evict(other, handle, client)
    with caplog.at_level(logging.INFO, "shared_rpc"):
        client.ping()
    assert has_numbers(handle.value)
    assert [record.levelno for record in caplog.records if handle.object_id in record.message] == [logging.INFO]


def test_many_handles_and_clients_are_renewed(broker: BrokerApp, client: Client, other: Client) -> None:
    """The first client replaces the memory for all of a process, and then each has an active lease on it."""
    second = broker.connect()
    handles = [client.call("load"), client.call("load"), second.call("load")]
    object_id = handles[0].object_id
    lose(other, object_id, client, second)
    evict(other, object_id)
    client.ping()
    handles[0].value.add_(1)
    second.ping()
    assert state(other, object_id) == ("device", 2, 2)
    assert all(torch.equal(handle.value, torch.arange(SIZE) + 1) for handle in handles)


def test_suspended_handles_stay_suspended(client: Client, other: Client) -> None:
    """Evicted objects are not restored for them, but for active ones."""
    asleep, awake = client.call("load", 1), [client.call("load", 2) for _ in range(2)]
    value = asleep.value
    asleep.suspend()
    awake[0].suspend()
    lose(other, awake[0].object_id, client)
    for handle in (asleep, awake[0]):
        evict(other, handle.object_id)
    client.ping()
    assert (state(other, asleep.object_id), state(other, awake[0].object_id)) == (("file", 1, 0), ("device", 1, 1))
    assert [handle.suspended for handle in (asleep, *awake)] == [True, True, False]
    asleep.resume()
    assert has_numbers(value) and has_numbers(awake[1].value)


def test_leases_of_suspended_handles_start_inactive(no_leaks: None, provider: Provider, serve: Serve, connect: Connect) -> None:
    """So that an active eviction is not abandoned for them."""
    provider.share("load", managed=True)(lambda number=0: torch.arange(SIZE))
    seen: list[str] = []
    server, client, other = serve(), connect(), connect()
    asleep, awake = client.call("load", 1), client.call("load", 2)
    asleep.suspend()
    lose(other, awake.object_id, client)
    leases = server._engine.core.leases
    for handle in (asleep, awake):
        leases.watch(handle.object_id, functools.partial(seen.append, handle.object_id))
    client.ping()
    assert (state(other, asleep.object_id), seen) == (("device", 1, 0), [awake.object_id])


# Memory that cannot be replaced.


def test_handles_without_capacity_become_suspended(client: Client, other: Client, caplog: pytest.LogCaptureFixture) -> None:
    """The first request of the new session succeeds. The process keeps the earlier memory, and gets the present one later."""
    handle = client.call("load")
    value = handle.value
    lose_and_evict(other, handle, client)
    buffer = other.create_buffer(2 * CAPACITY)
    client.ping()
    assert (handle.suspended, state(other, handle.object_id), has_numbers(value)) == (True, ("file", 1, 0), True)
    with pytest.raises(HandleSuspended, match=r"it was evicted while the session .* was lost: resume\(\) it"):
        _ = handle.value
    assert [record.levelno for record in caplog.records if "do not fit" in record.message] == [logging.WARNING]
    with pytest.raises(ServerBusy):
        handle.resume()
    assert (handle.suspended, has_numbers(value)) == (True, True)
    buffer.release()
    with handle.active() as again:
        assert again is value
        write(other)
        assert torch.equal(value, torch.arange(SIZE) + 1)
    assert (handle.suspended, state(other, handle.object_id)) == (False, ("device", 1, 1))


@pytest.mark.anyio
@pytest.mark.parametrize("blocks", [True, False], ids=["blocking", "coroutines"])
async def test_renewals_wait_for_capacity_briefly(
    no_leaks: None,
    broker_app: BrokerApp,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    blocks: bool,
) -> None:
    """If requests wait for it: the warning names the holders, and the wait ends with the request."""
    for module in (blocking, asynchronous):
        monkeypatch.setattr(module, "RENEWAL", 0.1)
    other = broker_app.serve(APP, options=EVICTS.format(tmp_path).split())
    client = broker_app.connect() if blocks else AsyncClient(broker_app.base_path, device="cpu", timeout=30.0)

    async def done(answer: Any) -> Any:
        return await answer if inspect.isawaitable(answer) else answer

    handle = await done(client.call("load"))
    lose_and_evict(other, handle, client)
    buffer = other.create_buffer(CAPACITY)
    await done(client.ping())
    assert (handle.suspended, has_numbers(handle._value)) == (True, True)
    assert [f"pid {os.getpid()} uses" in record.message for record in caplog.records if handle.object_id in record.message] == [
        True
    ]
    buffer.release()
    assert state(other, handle.object_id) == ("file", 1, 0)
    await done(handle.resume())
    assert (has_numbers(handle.value), other.get_server_info()["sessions"]) == (True, 2)
    await done(handle.release())
    await done(client.close())


def outdated(client: Client, other: Client) -> Handle[torch.Tensor]:
    """A handle that was suspended because its object had no capacity, which it has now."""
    handle = client.call("load")
    lose_and_evict(other, handle, client)
    with other.create_buffer(2 * CAPACITY):
        client.ping()
    assert handle.suspended
    return handle


def test_outdated_memory_is_unmapped_on_suspension(client: Client, other: Client) -> None:
    """Not before: another handle of the object does not unmap it."""
    handle = outdated(client, other)
    value = handle._value
    new = client.call("load")
    new.suspend()
    assert mapped(handle) and has_numbers(value)
    handle.suspend()
    assert not mapped(handle)
    evict(other, handle.object_id)
    handle.resume()
    assert (has_numbers(value), new.suspended, handle.suspended) == (True, True, False)


def test_memory_without_atomic_replacement_is_replaced_on_resumption(
    client: Client, other: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of GPUs, which kernels may use."""
    handle = client.call("load")
    value = handle.value
    lose_and_evict(other, handle, client)
    other.restore(handle.object_id)
    monkeypatch.setattr(type(HOST), "replaces", False)
    client.ping()
    assert (handle.suspended, has_numbers(value)) == (True, True)
    handle.resume()
    write(other)
    assert torch.equal(value, torch.arange(SIZE) + 1)


# Handles that are suspended and resumed between the sessions.


def test_a_session_lost_during_a_resumption_is_renewed(client: Client, other: Client) -> None:
    """After the server has sent the memory, and before it is mapped: it is requested again, in the new session."""
    handle = client.call("load")
    value = handle.value
    handle.suspend()
    turn, maps = Turn(), []

    def perform(step: Step) -> Any:
        if isinstance(step, Work) and not maps:
            maps.append(step)
            lose_and_evict(other, handle, client)
            client.ping()
        return client._perform(turn, step)

    drive(awakened(client, handle), perform)
    assert state(other, handle.object_id) == ("device", 1, 1)
    write(other)
    assert torch.equal(value, torch.arange(SIZE) + 1)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupted_renewal_is_completed_later(client: Client, other: Client) -> None:
    """At any point of a signal handler: the handle has the present memory after the next one, or is suspended."""
    handle = client.call("load")
    value = handle.value

    def begin() -> None:
        client.ping()
        handle.resume()
        lose_and_evict(other, handle, client)

    def is_present() -> bool:
        client.ping()
        if handle.suspended:
            return True
        with other.call("load") as theirs:
            theirs.value.add_(1)
            return torch.equal(theirs.value, value)

    begin()
    points = points_of(client.ping)
    seed = random.randrange(1 << 30)
    print(f"points chosen with the seed {seed}")
    for point in random.Random(seed).sample(range(1, points + 1), min(repetitions(40, 3000), points)):
        begin()
        with raising_handler(Interrupted):
            place, _ = interrupted_at(point, client.ping)
        eventually(is_present, 5.0, f"interrupted in {place}")


# Leases of the session that was lost.


def test_a_lease_lost_before_its_handle_is_not_renewed(client: Client, other: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new session has no lease for it, so the call fails; the next one has a lease."""

    def losing(result: ReceivedResult, values: Any) -> Any:
        lose(other, result.message.object_id, client)
        client.ping()
        return rebuild(result, values)

    with monkeypatch.context() as patch:
        patch.setattr(binding, "rebuild", losing)
        with pytest.raises(ConnectionClosed, match="call again"):
            client.call("load")
    handle = client.call("load")
    assert state(other, handle.object_id) == ("device", 1, 1)


def test_a_lost_lease_of_a_failed_rebuild_is_not_released(
    client: Client, other: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new session has a lease on the same object for another handle."""
    handle = client.call("load")
    client._values.clear()

    def failing(result: ReceivedResult, values: Any) -> Any:
        lose(other, handle.object_id, client)
        client.ping()
        raise ValueError("it cannot be rebuilt")

    monkeypatch.setattr(binding, "rebuild", failing)
    with pytest.raises(ValueError, match="it cannot be rebuilt"):
        client.call("load")
    assert state(other, handle.object_id) == ("device", 1, 1)


@pytest.mark.parametrize("release", [lambda client, handle: handle.release(), Client.release], ids=["handle", "client"])
def test_a_release_after_the_session_was_lost_affects_no_other(
    client: Client, other: Client, release: Callable[[Client, Handle[Any]], object]
) -> None:
    """The new session has a lease for another handle of the object."""
    first, second = client.call("load"), client.call("load")
    lose(other, first.object_id, client)
    release(client, first)
    client.ping()
    assert state(other, second.object_id) == ("device", 1, 1)


# Coroutines.


@pytest.mark.anyio
async def test_clients_of_coroutines_get_the_present_memory(broker: BrokerApp, other: Client) -> None:
    """Like blocking ones; suspended handles stay suspended."""
    async with AsyncClient(broker.base_path, device="cpu", timeout=30.0) as client:
        handle, asleep = await client.call("load", 1), await client.call("load", 2)
        value, address = handle.value, handle.value.data_ptr()
        await asleep.suspend()
        lose_and_evict(other, handle, client)
        evict(other, asleep.object_id)
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(client.ping)
        assert (state(other, handle.object_id), state(other, asleep.object_id)) == (("device", 1, 1), ("file", 1, 0))
        write(other, 1)
        assert (value.data_ptr(), torch.equal(value, torch.arange(SIZE) + 1)) == (address, True)
        assert (handle.suspended, asleep.suspended) == (False, True)
        await asleep.resume()
        assert has_numbers(asleep.value)


@pytest.mark.anyio
async def test_a_cancelled_renewal_suspends_the_handle(no_leaks: None, broker_app: BrokerApp, tmp_path: Path) -> None:
    """Rather than leaving it with the earlier memory."""
    other = broker_app.serve(APP, options=EVICTS.format(tmp_path).split())
    async with AsyncClient(broker_app.base_path, device="cpu", timeout=30.0) as client:
        handle = await client.call("load")
        lose_and_evict(other, handle, client)
        with other.create_buffer(CAPACITY):
            async with anyio.create_task_group() as group:
                lost = client._link
                group.start_soon(client.ping)
                while client._link is lost:
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            assert handle.suspended
        await handle.resume()
        assert has_numbers(handle.value)
