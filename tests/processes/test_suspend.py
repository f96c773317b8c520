"""Suspended handles: a process releases memory and later resumes it at its address, evicted in between or not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from shared_rpc import AsyncClient, AsyncHandle, Client, Handle, Provider, Server
from shared_rpc.errors import HandleSuspended, ServerBusy, StaleHandleError
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.apps import App, Connect, Serve
from tests.kit.brokers import BrokerApp, module_broker
from tests.kit.deep import deep
from tests.kit.processes import eventually, python, rights
from tests.kit.suspending import APP, SIZE, has_numbers


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory can be read."""
    return rights(tensor.untyped_storage().data_ptr()).startswith("r")


@pytest.fixture
def load(app: App) -> Callable[[], Handle[torch.Tensor]]:
    """The endpoint of tests for all roles."""
    return app.share("load", managed=True)(lambda: torch.arange(SIZE))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerApp]:
    """A server in another process, which evicts to files; this process maps its objects like any client."""
    with module_broker(directory := tmp_path_factory.mktemp("served"), APP, "--spill-dir", str(directory)) as served:
        yield served


@pytest.fixture
def client(broker: BrokerApp) -> Client:
    """A client of it."""
    return broker.connect()


def active(handle: Handle[Any]) -> int:
    """Return the number of sessions that have a handle's object active, according to the server."""
    return handle.get_object_info()["active"]


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


def test_suspended_handles_support_other_operations(app: App, load: Callable[[], Handle[torch.Tensor]]) -> None:
    """Everything that does not need the memory."""
    handle = load()
    handle.suspend()
    assert (handle.is_stale(), handle.is_current(), handle.revision, handle.released) == (False, True, 0, False)
    for needs in (lambda: handle.read_consistent(torch.clone), lambda: app.provider.update(handle).__enter__()):
        with pytest.raises(HandleSuspended):
            needs()
    latest = handle.latest()
    assert (has_numbers(latest.value), handle.suspended, latest.suspended) == (True, True, False)
    handle.release()
    assert (handle.suspended, handle.released, has_numbers(latest.value)) == (False, True, True)


def test_released_handles_can_be_neither_suspended_nor_resumed(load: Callable[[], Handle[torch.Tensor]]) -> None:
    """There is no lease to restore the memory."""
    handle = load()
    handle.release()
    for refused in (handle.suspend, handle.resume, handle.active().__enter__):
        with pytest.raises(StaleHandleError, match="was released") as caught:
            refused()
        assert caught.value.reason == "released"


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


def test_another_client_of_the_process_keeps_the_memory(broker: BrokerApp, client: Client) -> None:
    """Memory is mapped once in a process, until no client has a handle active; each reports to its own session."""
    one, other = client.call("load"), broker.connect().call("load")
    value = one.value
    one.suspend()
    assert (is_mapped(value), active(other)) == (True, 1)
    other.suspend()
    assert (is_mapped(value), active(other)) == (False, 0)
    one.resume()
    assert (has_numbers(value), active(other)) == (True, 1)


def test_suspended_values_cannot_be_arguments(client: Client) -> None:
    """Sending a tensor reads it: the error gives the remedy."""
    handle = client.call("load")
    value = handle.value
    handle.suspend()
    with pytest.raises(HandleSuspended, match=r"of load\(\).*resume\(\)"):
        client.call("load", value)
    assert value.is_shared()


# Sessions and processes.


def test_handles_without_a_lease_are_not_suspended(no_leaks: None, broker_app: BrokerApp) -> None:
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


# Coroutines.


@pytest.fixture
def async_client(broker: BrokerApp) -> Iterator[AsyncClient]:
    """An async client, which the test closes."""
    yield AsyncClient(broker.base_path, device="cpu", timeout=30.0)


@pytest.mark.anyio
async def test_coroutines_suspend_and_resume(async_client: AsyncClient) -> None:
    """With the same methods; a cancelled block unmaps the memory too."""
    async with async_client as client, await client.call("load") as handle:
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


def evict(client: Client, target: str) -> None:
    """Evict one object."""
    (moved,) = client.evict(target)
    assert moved["tier"] == "file"


@pytest.mark.parametrize("endpoint", ["load", *deep("load_read_only", "load_list")])
def test_evicted_objects_return_at_their_address(client: Client, endpoint: str) -> None:
    """After any number of evictions: earlier tensors have the bytes, and nothing is left of earlier memory."""
    gc.collect()
    MAPPINGS.drain()
    others = len(MAPPINGS)
    handle = client.call(endpoint)
    value = handle.value[0] if endpoint == "load_list" else handle.value
    address, view = value.data_ptr(), value[9:]
    for _ in range(3):
        handle.suspend()
        evict(client, handle.object_id)
        assert handle.get_object_info()["tier"] == "file"
        handle.resume()
        assert (handle.get_object_info()["tier"], value.data_ptr(), has_numbers(value)) == ("device", address, True)
        assert torch.equal(view, torch.arange(9, SIZE))
    assert len(MAPPINGS) == others + 1


def test_writes_survive_an_eviction(broker: BrokerApp, client: Client) -> None:
    """Of this process or another one; and later writes are visible to all."""
    handle, other = client.call("load"), broker.connect().call("load")
    handle.value.mul_(3)
    handle.suspend()
    with pytest.raises(ServerBusy):
        client.evict(handle)
    other.suspend()
    evict(client, handle.object_id)
    handle.resume()
    handle.value.add_(1)
    other.resume()
    assert torch.equal(other.value, torch.arange(SIZE) * 3 + 1)


def test_values_without_a_handle_keep_the_evicted_memory(client: Client) -> None:
    """The next call has the restored one, like all others."""
    old = client.call("get")
    (info,) = [each for each in client.list_objects() if each["endpoint"] == "get"]
    evict(client, info["object_id"])
    new = client.call("get")
    assert new is not old and has_numbers(new) and has_numbers(old)
    new.add_(1)
    assert has_numbers(old)
    assert client.call("get") is new


def test_tensors_of_another_object_share_the_resumed_memory(client: Client) -> None:
    """It shares memory with a suspended object: after the eviction of both, its tensors use the resumed memory."""
    handle, part = client.call("whole"), client.call("part")
    assert part.untyped_storage().data_ptr() == handle.value.untyped_storage().data_ptr()
    handle.suspend()
    assert torch.equal(part, torch.arange(10))
    moved = client.evict(handle)
    assert len(moved) == 2
    handle.resume()
    handle.value.add_(5)
    assert torch.equal(part, torch.arange(10) + 5)


# The server's own process.


@pytest.fixture
def server(provider: Provider, serve: Serve, tmp_path: Path) -> Callable[[], Server]:
    """A server in this process, which evicts to files."""
    provider.share("load", managed=True)(lambda: torch.arange(SIZE))
    return serve(spill_dir=tmp_path)


def test_the_servers_own_process_uses_the_restored_memory(
    no_leaks: None, provider: Provider, server: Server, connect: Connect
) -> None:
    """A suspended handle keeps nothing of the evicted memory, and the resumed one has the same memory as all others."""
    own = provider.call("load")
    found = MAPPINGS.find(own.value.data_ptr())
    assert found is not None
    name = found[0].info.id
    del found
    own.suspend()
    evict(connect(), own.object_id)

    def mapped() -> bool:
        gc.collect()
        MAPPINGS.drain()
        return name in Path("/proc/self/maps").read_text()

    eventually(lambda: not mapped())
    own.resume()
    with connect().call("load") as other:
        other.value.add_(1)
    assert torch.equal(own.value, torch.arange(SIZE) + 1)
    assert provider.call("load").value is own.value
