"""Callers that give up: the memory of late replies and of unsent requests is returned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.client import link as link_module
from shared_rpc.client.asynchronous import ShieldedThreadJob
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.codec import arguments
from shared_rpc.errors import DeadlineExceeded
from shared_rpc.memory.pool import PoolOptions
from tests.kit.processes import eventually

MIB = 1 << 20
SMALL = PoolOptions(initial=MIB, limit=8 * MIB)


@pytest.fixture
def server(no_leaks: None, base_path: str, go: threading.Event, begun: threading.Event) -> Iterator[Server]:
    """Endpoints that take and return memory, with small pools."""
    provider = Provider(base_path, device="cpu", pool=SMALL)

    @provider.share(cache=False)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @provider.share(cache=False, managed=True)
    def owned(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go.wait(30)
        return x * 3

    with Server(provider) as server:
        yield server


@contextmanager
def deaf_from(server: Server, begun: threading.Event, go: threading.Event) -> Iterator[None]:
    """Keep the server from reading from the beginning of an endpoint until its result was sent, at the end of the block."""
    engine = server.engine
    deaf: list[Any] = []

    def stop_reading() -> None:
        deaf.extend(client.stream for client in server._acceptor._connections)
        for connection in deaf:
            connection._loop.remove_reader(connection._socket.fileno())

    def go_on_reading() -> None:
        for connection in deaf:
            if connection._socket.fileno() >= 0:
                connection._loop.add_reader(connection._socket.fileno(), connection._turn)
                connection._turn()

    def deafen() -> None:
        assert begun.wait(30)
        engine.ask(lambda _: stop_reading())

    deafening = threading.Thread(target=deafen)
    deafening.start()
    try:
        yield
    finally:
        deafening.join()
        go.set()
        eventually(lambda: server.info()["running"] == 0)
        engine.ask(lambda _: go_on_reading())


def chunks(server: Server) -> int:
    """Return the number of chunks of results in use."""
    return int(server.info()["pools"]["chunks"])


def transfer_of(client: Client | AsyncClient) -> ClientTransfer:
    """Return the pools of the client's session."""
    session = client._known()
    assert session is not None
    return session.transfer


# Late replies.


def test_late_replies_release_their_memory(
    server: Server, begun: threading.Event, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of both sides and the lease are returned without another call, and the connection stays usable."""
    with Client(socket_path=server.socket_path, timeout=30.0, pool=SMALL) as client:
        client.call("doubled", torch.ones(4))
        monkeypatch.setattr(link_module, "BRIEFLY", 0.1)
        client._timeout = 0.2
        with deaf_from(server, begun, go), pytest.raises(DeadlineExceeded, match="is stuck"):
            client.call("owned", torch.ones(100))
        monkeypatch.undo()
        transfer, link = transfer_of(client), client._link
        eventually(lambda: chunks(server) == 0 and server.info()["leases"] == 0)
        client._timeout = 30.0
        eventually(lambda: client.call("doubled", torch.ones(4)).sum() == 8 and transfer.arguments.used <= 1)
        assert client._link is link
        assert server.info()["connections"] == 1


# Requests that were not sent.


@pytest.mark.asyncio
async def test_tasks_cancelled_while_arguments_are_written_wait(
    server: Server, monkeypatch: pytest.MonkeyPatch, go: threading.Event, begun: threading.Event
) -> None:
    """However often: until the end of the thread, which has chunks and descriptors."""
    encode = arguments.encode_arguments

    def slowly(*arguments: Any, **options: Any) -> Any:
        encoded = encode(*arguments, **options)
        begun.set()
        assert go.wait(30)
        return encoded

    async with AsyncClient(socket_path=server.socket_path, timeout=30.0, pool=SMALL) as client:
        await client.call("doubled", torch.ones(4))
        transfer = transfer_of(client)
        with monkeypatch.context() as patch:
            patch.setattr(arguments, "encode_arguments", slowly)
            task = asyncio.create_task(client.call("doubled", torch.ones(100)))
            await anyio.to_thread.run_sync(begun.wait, 30)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            assert not task.done()  # it has the thread's memory to see to
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        while transfer.arguments.used > 1:
            assert (await client.call("doubled", torch.ones(4))).sum() == 8


@pytest.mark.anyio
async def test_withdrawn_work_does_not_begin() -> None:
    """A thread that starts it at that moment does nothing; the result of finished work must be undone."""
    work = ShieldedThreadJob(lambda: pytest.fail("it was withdrawn"))
    assert not await work.stop()
    work.run()
    done = ShieldedThreadJob(lambda: 7)
    done.run()
    assert await done.stop() and done.result() == 7
