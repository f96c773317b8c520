"""Raw buffers between processes: memory without an endpoint, on each device."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from shared_rpc import Client, Provider
from shared_rpc.errors import BufferNotFound, CapabilityError, ConfigurationError
from shared_rpc.memory.devices import device_id, facts_of
from tests.kit.processes import Child, eventually
from tests.kit.world import World

on_the_host = pytest.mark.parametrize("device", ["cpu"], indirect=True)


@pytest.fixture
def world(device: str, world: World) -> World:
    """A server with endpoints that accept memory."""

    @world.share(cache=False)
    def add(target: torch.Tensor, number: float) -> None:
        target += number

    @world.share(cache=False)
    def itself(buffer_id: str) -> torch.Tensor:
        with world.provider.get_buffer(buffer_id) as buffer:
            return buffer.value

    return world


@pytest.fixture
def peer(world: World) -> Child:
    """Another process with a client."""
    return world.peer()


def size(device: str) -> int:
    """Return the size in bytes of a device's smallest segment."""
    return facts_of(device_id(device)).granularity


def reason(client: Client | Provider, buffer_id: str) -> str:
    """Return the reason why a buffer is unavailable."""
    with pytest.raises(BufferNotFound) as caught:
        client.get_buffer(buffer_id)
    return caught.value.reason


def used(client: Client | Provider, device: str = "cpu") -> int:
    """Return the bytes of a device that the server's objects use."""
    (found,) = [entry["used"] for entry in client.list_devices() if entry["id"] == device_id(device)]
    return int(found)


def settle(device: str) -> None:
    """Wait until other processes can see writes to a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def test_two_processes_share_a_buffer(client: Client, peer: Child, device: str) -> None:
    """Both read and write it without a copy, even after the end of its creator; it ends with its last holder."""
    order = "kv = client.create_buffer((2, 4, 16), 'bfloat16', zero=True); print('made', kv.object_id)"
    with client.get_buffer(peer.ask(order, "made")) as buffer:
        cache = buffer.value
        assert (tuple(cache.shape), cache.dtype, cache.device.type) == ((2, 4, 16), torch.bfloat16, device)
        assert not cache.any()
        cache[1, 2] = 7.0
        settle(device)
        assert peer.ask("print('seen', kv.value[1, 2].float().sum().item())", "seen") == str(7.0 * 16)
        peer.ask("kv.value[0] = 3.0; print('at', kv.value[0].float().sum().item())", "at")
        assert cache[0].float().sum().item() == 3.0 * 4 * 16
        peer.kill()
        eventually(lambda: client.get_object_info(buffer)["leases"] == 1)
        assert cache[1, 2].float().sum().item() == 7.0 * 16
        assert used(client, device) == size(device)
    assert reason(client, buffer.object_id) == "released"
    assert used(client, device) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_gpu_servers_create_host_buffers(client: Client, peer: Child, device: str) -> None:
    """Raw memory has no endpoint, so a GPU's server allocates it on any device."""
    made = peer.ask("b = client.create_buffer(8, 'float32', 'cpu'); b.value.fill_(4); print('made', b.object_id)", "made")
    with client.get_buffer(made) as buffer:
        assert buffer.value.tolist() == [4.0, 4.0]
        assert used(client, "cpu") == size("cpu")
        client.free_buffer(buffer)


def test_expired_buffers_are_freed(client: Client, device: str) -> None:
    """By the server itself."""
    client.create_buffer(100, ttl=0.1).release()
    eventually(lambda: client.get_server_info()["objects"] == 0)
    assert used(client, device) == 0


def test_devices_are_listed(client: Client, device: str) -> None:
    """Kind, memory, and the server's use of it."""
    chosen = device_id(device)
    devices = {entry["id"]: entry for entry in client.list_devices()}
    assert set(devices) >= {chosen, "cpu"} and (device == "cuda" or set(devices) == {"cpu"})
    for entry in devices.values():
        assert entry["kind"] == ("cpu" if entry["id"] == "cpu" else "cuda")
        assert entry["name"] and entry["limit"] is None and entry["used"] == 0
    assert 0 < (devices[chosen]["free"] or 0) <= (devices[chosen]["total"] or 0)
    with client.create_buffer(10):
        assert used(client, device) == size(device)


@on_the_host
@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((1,), {"device": "GPU-1"}, "allocates no memory on GPU-1: use one of cpu"),
        ((1,), {"ttl": 0}, "ttl=0"),
        ((1,), {"ttl": 5.0, "keep": True}, "use one"),
        ((1,), {"ttl": float("nan")}, "ttl=nan"),
    ],
    ids=str,
)
def test_invalid_requests_are_refused(client: Client, arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    """The error names the problem, and nothing is created."""
    with pytest.raises((ConfigurationError, CapabilityError), match=text):
        client.create_buffer(*arguments, **options)
    assert client.get_server_info()["objects"] == 0


def test_buffers_work_in_every_role(world: World, role: str) -> None:
    """A tensor of the requested form, in a handle; an access by id returns the same one."""
    provider = world.provider
    with provider.create_buffer((2, 3), torch.float32, zero=True) as buffer:
        value = buffer.value
        assert (tuple(value.shape), value.dtype, value.device.type) == ((2, 3), torch.float32, world.device)
        assert not buffer.value.any()
        info = buffer.get_object_info()
        assert (info["kind"], info["state"], info["leases"]) == ("buffer", "listed", 1)
        assert used(provider, world.device) == size(world.device)
        with provider.get_buffer(buffer.object_id) as same:
            assert same.value is buffer.value
        assert not buffer.is_stale()
    eventually(lambda: used(provider, world.device) == 0)


def test_endpoints_use_buffers_of_their_server(world: World, client: Client, device: str) -> None:
    """They get one by its id, and may return the memory itself: writes of clients and of the server are visible to all."""
    with world.provider.create_buffer((8,), "float32", zero=True) as buffer:
        returned = client.call("itself", buffer.object_id)
        returned.add_(1)
        settle(device)
        assert buffer.value.tolist() == [1.0] * 8
        world.provider.call("add", buffer.value[2:4], 6.0)
        settle(device)
        assert returned.tolist() == [1.0, 1.0, 7.0, 7.0, 1.0, 1.0, 1.0, 1.0]
        assert {holder["pid"] for holder in client.list_objects()[0]["holders"]} == {os.getpid()}
        assert client.free_buffer(buffer.object_id)
