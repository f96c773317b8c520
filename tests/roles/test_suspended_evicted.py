"""Suspended handles of objects that are evicted meanwhile: other memory comes to the same addresses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.errors import ServerBusy
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.apps import Connect, Serve
from tests.kit.brokers import BrokerApp, module_broker
from tests.kit.deep import deep
from tests.kit.processes import Child, eventually, python
from tests.kit.suspending import APP, SIZE, has_numbers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerApp]:
    """A server of another process, which evicts to files."""
    with module_broker(directory := tmp_path_factory.mktemp("served"), APP, "--spill-dir", str(directory)) as served:
        yield served


@pytest.fixture
def client(broker: BrokerApp) -> Client:
    """A client of it."""
    return broker.connect()


def evict(client: Client, target: str) -> None:
    """Evict one object."""
    (moved,) = client.evict(target)
    assert moved["tier"] == "file"


@pytest.mark.parametrize("endpoint", ["load", *deep("load_read_only", "load_list")])
def test_an_evicted_object_comes_back_at_its_address(client: Client, endpoint: str) -> None:
    """As often as it is evicted: tensors that were taken before have the bytes, and nothing is left of earlier memory."""
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


def test_what_was_written_before_is_there_after_an_eviction(broker: BrokerApp, client: Client) -> None:
    """By this process or another one; and what is written after it is seen by all who have it."""
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


def test_a_module_comes_back_with_what_the_process_has_of_its_own(client: Client) -> None:
    """Parameters are shared and go; statistics that each process has for itself stay as they were."""
    handle = client.call("load_module")
    module = handle.value
    norm = module[1]
    with torch.no_grad():
        before = module.train()(torch.ones(4, 300))
    mean = norm.running_mean.clone()
    handle.suspend()
    evict(client, handle.object_id)
    assert torch.equal(norm.running_mean, mean)
    handle.resume()
    with torch.no_grad():
        assert torch.equal(module(torch.ones(4, 300)), before)


def test_memory_without_a_handle_is_not_mixed_up_with_the_restored(client: Client) -> None:
    """A value that nothing leases keeps the memory that was evicted; the next call has what all others have."""
    old = client.call("get")
    (info,) = [each for each in client.list_objects() if each["endpoint"] == "get"]
    evict(client, info["object_id"])
    new = client.call("get")
    assert new is not old and has_numbers(new) and has_numbers(old)
    new.add_(1)
    assert has_numbers(old)
    assert client.call("get") is new


def test_tensors_of_another_object_in_the_memory_come_along(client: Client) -> None:
    """They share it with a suspended object: after the eviction of both, they are over what is resumed."""
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
    """A server of this process, which evicts to files."""
    provider.share("load", managed=True)(lambda: torch.arange(SIZE))
    return serve(spill_dir=tmp_path)


def test_the_servers_own_process_has_what_was_restored(
    no_leaks: None, provider: Provider, server: Server, connect: Connect, base_path: str, children: list[Child]
) -> None:
    """A suspended handle keeps nothing of what was evicted, and the resumed one has the memory that all have then."""
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
        with open("/proc/self/maps") as maps:
            return name in maps.read()

    eventually(lambda: not mapped())
    own.resume()
    assert has_numbers(own.value)
    writer = python(
        """
        from shared_rpc import Client
        with Client(device="cpu") as client, client.call("load") as handle:
            handle.value.add_(1)
        print("written")
        """
    )
    children.append(writer)
    writer.expect("written")
    assert torch.equal(own.value, torch.arange(SIZE) + 1)
    assert provider.call("load").value is own.value


def test_a_warm_object_of_the_servers_own_process_is_the_same_again(no_leaks: None, provider: Provider, server: Server) -> None:
    """It is the endpoint's result, which nobody has evicted."""
    own = provider.call("load")
    value = own.value
    own.suspend()
    own.resume()
    assert own.value is value
