"""Reconnected clients whose objects moved to other tiers before the next session renewed their leases."""

from __future__ import annotations

import logging
import mmap
import socket
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch

from shared_rpc import AsyncClient, AsyncHandle, Client, Handle
from shared_rpc.errors import HandleSuspended, ServerBusy
from shared_rpc.memory.backends.host import HOST
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.brokers import BrokerApp, module_broker
from tests.kit.processes import eventually
from tests.kit.suspending import APP, SIZE, has_numbers

#: Bytes of an object, in pages.
CAPACITY = -(-SIZE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


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


@pytest.mark.parametrize(("endpoint", "restored"), [("load", False), ("load_read_only", True)])
def test_active_handles_get_the_present_memory(client: Client, other: Client, endpoint: str, restored: bool) -> None:
    """At the same address, without the earlier memory; the object is not evicted any more."""
    handle = client.call(endpoint)
    value = handle.value
    address, view, others = value.data_ptr(), value[9:], len(MAPPINGS)
    seen = mapped(handle)
    for _ in range(2):
        lose_and_evict(other, handle, client)
        if restored:
            other.restore(handle.object_id)
        client.ping()
        assert state(other, handle.object_id) == ("device", 1, 1)
        assert (value.data_ptr(), has_numbers(value), torch.equal(view, torch.arange(9, SIZE))) == (address, True, True)
        (present,) = mapped(handle)
        assert (present in seen, handle.suspended, len(MAPPINGS)) == (False, False, others)
        seen.append(present)
        with pytest.raises(ServerBusy, match="in use by pid"):
            other.evict(handle.object_id)


def test_writes_to_replaced_memory_are_lost_with_a_warning(
    client: Client, other: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes of this process, after its session was lost."""
    handle = client.call("load")
    lose_and_evict(other, handle, client)
    handle.value.fill_(100)
    with caplog.at_level(logging.WARNING, "shared_rpc"):
        client.ping()
    assert has_numbers(handle.value)
    (record,) = [record for record in caplog.records if handle.object_id in record.message]
    assert "what this process wrote to it since is lost" in record.message


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
    assert any("do not fit" in record.message for record in caplog.records)
    with pytest.raises(ServerBusy):
        handle.resume()
    assert (handle.suspended, has_numbers(value)) == (True, True)
    buffer.release()
    with handle.active() as again:
        assert again is value
        write(other)
        assert torch.equal(value, torch.arange(SIZE) + 1)
    assert (handle.suspended, state(other, handle.object_id)) == (False, ("device", 1, 1))


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


# Leases of the session that was lost.


def test_a_release_after_the_session_was_lost_affects_no_other(client: Client, other: Client) -> None:
    """The new session has a lease for another handle of the object."""
    first, second = client.call("load"), client.call("load")
    lose(other, first.object_id, client)
    first.release()
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
