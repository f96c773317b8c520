"""Suspended handles: a process releases memory and later resumes it at its address, evicted in between or not.

Also those of a client that lost its connection: its next session renews the leases of objects that may have moved since.
"""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from shared_rpc import AsyncClient, AsyncHandle, Client, Handle
from shared_rpc.errors import HandleSuspended, ServerBusy, StaleHandleError
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.brokers import BrokerApp, module_broker
from tests.kit.processes import eventually, python, rights
from tests.kit.raw import disconnect
from tests.kit.world import World

#: Number of elements of the tensors, and their bytes in pages.
SIZE = 5000
CAPACITY = -(-SIZE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

APP = f"""
@provider.share(managed=True)
def load(number=0):
    return torch.arange({SIZE})

@provider.share(managed=True, access="read")
def load_read_only():
    return torch.arange({SIZE})
"""


def has_numbers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the bytes made by the app's endpoints."""
    return torch.equal(tensor, torch.arange(SIZE))


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory can be read."""
    return rights(tensor.untyped_storage().data_ptr()).startswith("r")


@pytest.fixture
def load(world: World, role: str) -> Callable[[], Handle[torch.Tensor]]:
    """The endpoint of tests for all roles."""
    return world.share("load", managed=True)(lambda: torch.arange(SIZE))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerApp]:
    """A server of another process, with capacity for two objects, which evicts to files on request."""
    directory = tmp_path_factory.mktemp("served")
    with module_broker(directory, APP, spill_dir=str(directory), quotas={"cpu": 2 * CAPACITY}) as served:
        yield served


@pytest.fixture
def client(broker: BrokerApp) -> Client:
    """A client of it, in this process, which maps its objects like any other."""
    return broker.connect()


@pytest.fixture
def other(broker: BrokerApp) -> Client:
    """A client that moves objects."""
    return broker.connect()


def active(handle: Handle[Any]) -> int:
    """Return the number of sessions that have a handle's object active, according to the server."""
    return handle.get_object_info()["active"]


def evict(client: Client, target: str) -> None:
    """Evict one object."""
    (moved,) = client.evict(target)
    assert moved["tier"] == "file"


# In every role.


def test_the_value_is_available_again_after_resume(load: Callable[[], Handle[torch.Tensor]]) -> None:
    """In between, access raises, and the server counts no active session."""
    handle = load()
    value = handle.value
    assert (handle.suspended, active(handle)) == (False, 1)
    handle.suspend()
    with pytest.raises(HandleSuspended, match=rf"object {handle.object_id} is suspended.*resume\(\).*active\(\)"):
        _ = handle.value
    assert (handle.suspended, active(handle), "suspended" in repr(handle)) == (True, 0, True)
    handle.resume()
    assert handle.value is value
    assert (handle.suspended, active(handle), has_numbers(value)) == (False, 1, True)


def test_suspended_handles_support_other_operations(world: World, load: Callable[[], Handle[torch.Tensor]], role: str) -> None:
    """Everything that does not need the memory."""
    handle = load()
    handle.suspend()
    assert (handle.is_stale(), handle.is_current(), handle.revision, handle.released) == (False, True, 0, False)
    for needs in (lambda: handle.read_consistent(torch.clone), lambda: world.provider.update(handle).__enter__()):
        with pytest.raises(HandleSuspended):
            needs()
    latest = handle.latest()
    assert (has_numbers(latest.value), handle.suspended, latest.suspended) == (True, True, False)
    handle.release()
    assert (handle.suspended, handle.released, has_numbers(latest.value)) == (False, True, True)


def test_a_block_restores_the_handles_state(load: Callable[[], Handle[torch.Tensor]]) -> None:
    """Active within, however it ends, and nested too; a suspension within takes effect at its end."""
    handle = load()
    with handle.active() as value:
        handle.suspend()
        assert has_numbers(value)
    assert handle.suspended
    with pytest.raises(ZeroDivisionError), handle.active() as value:
        with handle.active() as same:
            assert same is value and has_numbers(value)
        assert (handle.suspended, active(handle)) == (False, 1)
        raise ZeroDivisionError
    assert (handle.suspended, active(handle)) == (True, 0)


def test_an_object_is_active_until_its_last_handle_is_suspended(load: Callable[[], Handle[torch.Tensor]]) -> None:
    """Or has ended. Suspending one of two handles unmaps nothing; the value of the other one remains usable."""
    one, other = load(), load()
    value = one.value
    one.suspend()
    assert (active(one), has_numbers(value), one.suspended) == (1, True, True)
    other.suspend()
    assert active(one) == 0
    third = load()
    assert (active(one), third.value is value, one.suspended) == (1, True, True)
    del third
    gc.collect()
    eventually(lambda: active(one) == 0)
    one.resume()
    assert (active(one), has_numbers(one.value)) == (1, True)


# Memory of a client.


def test_suspended_values_cannot_be_arguments(client: Client) -> None:
    """Sending a tensor reads it: the error gives the remedy."""
    handle = client.call("load")
    value = handle.value
    handle.suspend()
    with pytest.raises(HandleSuspended, match=r"of load\(\).*resume\(\)"):
        client.call("load", value)
    assert value.is_shared()


def test_handles_without_a_lease_are_not_suspended(broker_app: BrokerApp) -> None:
    """Their memory could not be restored: a restarted server lacks the object."""
    broker_app.write(APP)
    first, client = broker_app.start(), broker_app.connect()
    handle, suspended = client.call("load"), client.call("load_read_only")
    suspended.suspend()
    first.kill()
    broker_app.start()
    with pytest.raises(StaleHandleError):
        handle.suspend()
    with pytest.raises(StaleHandleError):
        suspended.active().__enter__()
    assert suspended.suspended  # its memory is unmapped still
    with handle.active() as value:
        pass
    assert (handle.suspended, has_numbers(value)) == (False, True)


@pytest.mark.anyio
async def test_coroutines_suspend_and_resume(broker: BrokerApp) -> None:
    """With the same methods; a cancelled block unmaps the memory too."""
    async with AsyncClient(broker.base_path, device="cpu", timeout=30.0) as client, await client.call("load") as handle:
        assert isinstance(handle, AsyncHandle)
        value = handle.value
        await handle.suspend()
        with pytest.raises(HandleSuspended):
            _ = handle.value
        assert (is_mapped(value), (await handle.get_object_info())["active"]) == (False, 0)
        with anyio.CancelScope() as scope:
            async with handle.active() as again:
                assert again is value and has_numbers(value)
                scope.cancel()
                await anyio.sleep_forever()
        assert (handle.suspended, is_mapped(value), (await handle.get_object_info())["active"]) == (True, False, 0)
        await handle.resume()
        assert (has_numbers(handle.value), (await handle.get_object_info())["active"]) == (True, 1)


def test_accesses_to_suspended_memory_end_only_the_process(broker: BrokerApp, client: Client) -> None:
    """By SIGSEGV, with the address and the remedy; others have the object as before."""
    handle = client.call("load")
    culprit = python(
        """
        from shared_rpc import Client
        handle = Client(device="cpu").call("load")
        value = handle.value
        handle.suspend()
        value.sum()
        """
    )
    code, errors = culprit.close()
    assert code == -11
    assert f"object {handle.object_id} of load()" in errors and "resume()" in errors
    assert has_numbers(handle.value)


# Objects that are evicted in the meantime: other memory is mapped at the same addresses.


@pytest.mark.parametrize("endpoint", ["load", "load_read_only"])
def test_evicted_objects_return_at_their_address(client: Client, endpoint: str) -> None:
    """After any number of evictions: earlier tensors have the bytes, and nothing is left of earlier memory."""
    gc.collect()
    MAPPINGS.drain()
    others = len(MAPPINGS)
    handle = client.call(endpoint)
    value = handle.value
    address, view = value.data_ptr(), value[9:]
    for _ in range(3):
        handle.suspend()
        evict(client, handle.object_id)
        assert handle.get_object_info()["tier"] == "file"
        handle.resume()
        assert (handle.get_object_info()["tier"], value.data_ptr(), has_numbers(value)) == ("device", address, True)
        assert torch.equal(view, torch.arange(9, SIZE))
    assert len(MAPPINGS) == others + 1


def test_objects_of_several_clients_are_evicted_once_all_are_suspended(client: Client, other: Client) -> None:
    """Memory is mapped once in a process, until no client has a handle active; writes survive, and later ones reach all."""
    handle, theirs = client.call("load"), other.call("load")
    value = handle.value.mul_(3)
    handle.suspend()
    assert (is_mapped(value), active(theirs)) == (True, 1)
    with pytest.raises(ServerBusy):
        client.evict(handle)
    theirs.suspend()
    assert (is_mapped(value), active(theirs)) == (False, 0)
    evict(client, handle.object_id)
    handle.resume()
    value.add_(1)
    theirs.resume()
    assert torch.equal(theirs.value, torch.arange(SIZE) * 3 + 1)


def test_the_servers_own_process_uses_the_restored_memory(world: World, tmp_path: Path) -> None:
    """A suspended handle keeps nothing of the evicted memory, and the resumed one has the same memory as all others."""
    world.share("load", managed=True)(lambda: torch.arange(SIZE))
    world.serve(spill_dir=tmp_path)
    own = world.provider.call("load")
    found = MAPPINGS.find(own.value.data_ptr())
    assert found is not None
    name = found[0].info.id
    del found
    own.suspend()
    evict(world.client(), own.object_id)

    def mapped() -> bool:
        gc.collect()
        MAPPINGS.drain()
        return name in Path("/proc/self/maps").read_text()

    eventually(lambda: not mapped())
    own.resume()
    with world.client().call("load") as other:
        other.value.add_(1)
    assert torch.equal(own.value, torch.arange(SIZE) + 1)
    assert world.provider.call("load").value is own.value


# Objects of a lost session.


def lose(client: Client, handle: Handle[Any], other: Client) -> None:
    """Break the client's connection, without a close on either side, and wait until the server has detected it."""
    disconnect(client)
    eventually(lambda: state(other, handle)[1] == 0)


def state(other: Client, handle: Handle[Any]) -> tuple[str, int, int]:
    """Return an object's tier, and the numbers of sessions that hold it and that have it active."""
    info = other.get_object_info(handle.object_id)
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
        lose(client, handle, other)
        evict(other, handle.object_id)
        if restored:
            other.restore(handle.object_id)
        client.ping()
        assert state(other, handle) == ("device", 1, 1)
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
    lose(client, handle, other)
    evict(other, handle.object_id)
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
    lose(client, awake[0], other)
    for handle in (asleep, awake[0]):
        evict(other, handle.object_id)
    client.ping()
    assert (state(other, asleep), state(other, awake[0])) == (("file", 1, 0), ("device", 1, 1))
    assert [handle.suspended for handle in (asleep, *awake)] == [True, True, False]
    asleep.resume()
    assert has_numbers(value) and has_numbers(awake[1].value)


def test_handles_without_capacity_become_suspended(client: Client, other: Client, caplog: pytest.LogCaptureFixture) -> None:
    """The first request of the new session succeeds. The process keeps the earlier memory, and gets the present one later."""
    handle = client.call("load")
    value = handle.value
    lose(client, handle, other)
    evict(other, handle.object_id)
    buffer = other.create_buffer(2 * CAPACITY)
    client.ping()
    assert (handle.suspended, state(other, handle), has_numbers(value)) == (True, ("file", 1, 0), True)
    with pytest.raises(HandleSuspended, match=r"evicted while the connection to the server was lost, .*: resume\(\) it"):
        _ = handle.value
    assert any("do not fit" in record.message for record in caplog.records)
    with pytest.raises(ServerBusy):
        handle.resume()
    assert (handle.suspended, has_numbers(value)) == (True, True)
    buffer.release()
    with handle.active() as again:
        assert again is value
        with other.call("load") as theirs:
            theirs.value.add_(1)
        assert torch.equal(value, torch.arange(SIZE) + 1)
    assert (handle.suspended, state(other, handle)) == (False, ("device", 1, 1))
