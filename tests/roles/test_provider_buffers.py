"""Raw buffers by way of a provider: the same in every role, on each device."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shared_rpc import Handle, Provider, Server
from shared_rpc.client.steps import Request
from shared_rpc.errors import BufferNotFound, ConfigurationError
from shared_rpc.memory.devices import device_id, facts_of
from shared_rpc.protocol import messages as m
from shared_rpc.provider.loopback import _LocalCaller
from tests.kit.apps import EACH_ROLE, Connect
from tests.kit.descriptors import new_fd, nothing_leaks
from tests.kit.processes import eventually


@pytest.fixture(params=EACH_ROLE)
def provider(request: pytest.FixtureRequest, device: str, no_leaks: None, base_path: str) -> Iterator[Provider]:
    """A provider in each role; a client's server is another one in this process."""
    provider = Provider(base_path, execution_mode=request.param, device=device, server_startup_timeout=0)
    owner = Provider(base_path, execution_mode="server", device=device)
    if request.param == "client":
        Server(owner).start()
    yield provider
    provider.close()
    owner.close()


def used(provider: Provider, device: str) -> int:
    """Bytes of a device that objects take."""
    (found,) = [entry["used"] for entry in provider.list_devices() if entry["id"] == device_id(device)]
    return int(found)


def test_an_answer_of_this_process_that_cannot_be_made() -> None:
    """Where one descriptor cannot be copied, the copies of those before it are closed."""
    caller = _LocalCaller(cast(Any, None), Request(m.Ping(), "a test"))
    fd = new_fd()
    with nothing_leaks(), pytest.raises(OSError, match="Bad file descriptor"):
        caller.reply(m.Pong(), owners=cast(Any, (SimpleNamespace(number=fd), SimpleNamespace(number=-1))))
    os.close(fd)


def test_a_buffer_in_every_role(provider: Provider, device: str) -> None:
    """It is a tensor as it was asked for, in a handle; whoever gets it by its id gets the same one."""
    with provider.create_buffer((2, 3), torch.float32, zero=True) as buffer:
        assert isinstance(buffer, Handle)
        assert (tuple(buffer.value.shape), buffer.value.dtype, buffer.value.device.type) == ((2, 3), torch.float32, device)
        assert not buffer.value.any()
        with provider.get_buffer(buffer.object_id) as same:
            assert same.value is buffer.value
        info = buffer.get_object_info()
        assert (info["kind"], info["state"], info["leases"]) == ("buffer", "listed", 1)
        assert used(provider, device) == facts_of(device_id(device)).granularity
        assert (provider.free_buffer(buffer), provider.free_buffer(buffer.object_id)) == (True, False)
        with pytest.raises(BufferNotFound) as caught:
            provider.get_buffer(buffer.object_id)
        assert caught.value.reason == "freed"
        assert not buffer.is_stale()
    eventually(lambda: used(provider, device) == 0)


def test_its_terms_in_every_role(provider: Provider) -> None:
    """How often it may be got."""
    with provider.create_buffer(16, "int32", ttl=60, max_accesses=1) as buffer:
        assert buffer.get_object_info()["accesses_left"] == 1
        provider.get_buffer(buffer.object_id).release()
        with pytest.raises(BufferNotFound, match="has reached its max_accesses"):
            provider.get_buffer(buffer.object_id)


def test_a_handle_that_is_garbage_in_every_role(provider: Provider, device: str) -> None:
    """Its lease goes back, and with a freed buffer the memory; a tensor that was taken from it keeps the mapping."""
    buffer = provider.create_buffer((4,), "float32", zero=True)
    tensor = buffer.value
    provider.free_buffer(buffer)
    del buffer
    gc.collect()
    eventually(lambda: used(provider, device) == 0)
    assert tensor.sum().item() == 0


# The server's own process, and its clients.


@pytest.fixture
def server(device: str, no_leaks: None, base_path: str) -> Iterator[tuple[Provider, Server]]:
    """A provider that serves, with one quota."""
    provider = Provider(base_path, device=device)

    @provider.share(cache=False)
    def itself(buffer_id: str) -> torch.Tensor:
        with provider.get_buffer(buffer_id) as buffer:
            return buffer.value

    @provider.share(cache=False)
    def filled(target: torch.Tensor, value: float) -> None:
        target.fill_(value)

    with Server(provider, quotas={device: 4 * facts_of(device_id(device)).granularity}) as server:
        yield provider, server


def test_a_server_s_own_buffer_is_its_clients_too(server: tuple[Provider, Server], device: str, connect: Connect) -> None:
    """Both sides have the same memory, whoever made it."""
    provider, _ = server
    client = connect(device=device)
    with provider.create_buffer((8,), "float32") as mine, client.get_buffer(mine.object_id) as theirs:
        mine.value.fill_(3)
        if device == "cuda":
            torch.cuda.synchronize()
        assert theirs.value.sum().item() == 24
        assert {holder["pid"] for holder in client.list_objects()[0]["holders"]} == {os.getpid()}
        assert client.free_buffer(mine.object_id)
    with client.create_buffer((8,), "float32") as theirs, provider.get_buffer(theirs.object_id) as mine:
        theirs.value.fill_(5)
        if device == "cuda":
            torch.cuda.synchronize()
        assert mine.value.sum().item() == 40
        assert provider.free_buffer(mine)
    eventually(lambda: client.get_server_info()["objects"] == 0)


def test_an_endpoint_uses_its_server_s_buffers(server: tuple[Provider, Server], device: str, connect: Connect) -> None:
    """It gets one by its id, and may return the memory itself: what a client writes there is seen by all."""
    provider, _ = server
    client = connect(device=device)
    with provider.create_buffer((8,), "float32", zero=True) as buffer:
        returned = client.call("itself", buffer.object_id)
        returned.add_(1)
        if device == "cuda":
            torch.cuda.synchronize()
        assert buffer.value.tolist() == [1.0] * 8
        provider.call("filled", buffer.value[2:4], 7.0)
        if device == "cuda":
            torch.cuda.synchronize()
        assert returned.tolist() == [1.0, 1.0, 7.0, 7.0, 1.0, 1.0, 1.0, 1.0]
        provider.free_buffer(buffer)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
class TestOnTheHost:
    """What goes wrong, which no device makes different."""

    @pytest.mark.parametrize("provider", ["local", "server"], indirect=True)
    def test_on_the_event_loop_of_endpoints(self, provider: Provider) -> None:
        """An async endpoint would wait for itself: it is told what to do."""

        @provider.share(cache=False)
        async def careless() -> None:
            provider.create_buffer(100)

        with pytest.raises(ConfigurationError, match=r"create_buffer\(\) was called on the server's event loop"):
            asyncio.run(careless())
