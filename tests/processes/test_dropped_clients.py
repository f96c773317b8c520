"""Clients that are dropped without a close: the last reference ends the session, without the cyclic collector."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import anyio
import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.processes import eventually, open_fds


@pytest.fixture(autouse=True)
def no_collector(no_leaks: None) -> Iterator[None]:
    """Only reference counts free objects."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def server(no_collector: None, base_path: str, device: str) -> Iterator[Server]:
    """Endpoints that take and return memory."""
    provider = Provider(base_path, device=device)

    provider.share("doubled", cache=False)(lambda x: x * 2)
    provider.share("kept", managed=True)(lambda: torch.ones(3, device=device))

    with Server(provider) as server:
        yield server


@pytest.fixture
def make(server: Server, base_path: str, device: str) -> Callable[[], Client]:
    """Make a client, which the caller drops."""
    return lambda: Client(base_path, device=device, timeout=30.0)


@pytest.fixture
def make_async(server: Server, base_path: str, device: str) -> Callable[[], AsyncClient]:
    """Make an async client, which the caller drops."""
    return lambda: AsyncClient(base_path, device=device, timeout=30.0)


def await_end(server: Server) -> None:
    """Wait until the server has no session, and nothing that belonged to one."""
    eventually(lambda: not server.info()["sessions"], what="the session's end")
    assert server.info()["leases"] == 0


def test_a_dropped_client_ends_its_session(server: Server, make: Callable[[], Client], device: str) -> None:
    """At once; a result stays valid, and then descriptors, mappings and pools of both sides are freed."""
    MAPPINGS.drain()
    descriptors, mappings = open_fds(), len(MAPPINGS)
    client = make()
    result = client.call("doubled", torch.arange(1000, device=device))
    dropped = weakref.ref(client)
    del client
    assert dropped() is None
    await_end(server)
    assert result.sum() == 999000
    del result
    MAPPINGS.drain()
    eventually(lambda: (open_fds(), len(MAPPINGS)) == (descriptors, mappings))
    assert server.info()["pools"] == {"nbytes": 0, "chunks": 0}


def test_threads_do_not_keep_a_client(server: Server, make: Callable[[], Client]) -> None:
    """The thread of a subscription ends with the client."""
    client = make()
    subscription = client.on_refresh(lambda generation: None)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "shared-rpc-refreshes")
    dropped = weakref.ref(client)
    del client
    assert dropped() is None
    thread.join(30)
    assert not thread.is_alive()
    assert not subscription.active
    await_end(server)


def test_an_async_client_dropped_on_its_loop_ends_its_session(
    server: Server, make_async: Callable[[], AsyncClient], anyio_backend: str, device: str
) -> None:
    """Without blocking the loop."""

    async def main() -> None:
        client = make_async()
        assert (await client.call("doubled", torch.arange(1000, device=device))).sum() == 999000
        handle = await client.call("kept")
        dropped = weakref.ref(client)
        del client
        assert not await handle.is_stale()  # which keeps it
        del handle
        await anyio.to_thread.run_sync(await_end, server)
        assert dropped() is None

    anyio.run(main, backend=anyio_backend)


def test_an_async_client_dropped_after_its_loop_ends_its_session(
    server: Server, make_async: Callable[[], AsyncClient], anyio_backend: str
) -> None:
    """The end needs no loop."""
    client = make_async()
    anyio.run(client.ping, backend=anyio_backend)
    dropped = weakref.ref(client)
    del client
    assert dropped() is None
    await_end(server)
