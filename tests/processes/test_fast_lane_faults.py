"""Faults around pools: sessions that end during calls, callers that give up, and false claims about chunks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.errors import DeadlineExceeded
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.records import StorageEntry, TensorEntry, TensorTable
from shared_rpc.protocol.values import TensorRef, encode
from tests.kit.processes import Child, eventually, python
from tests.kit.raw import Raw

MIB = 1 << 20
SMALL = PoolOptions(initial=MIB, limit=8 * MIB)


@pytest.fixture
def server(no_leaks: None, base_path: str, go: threading.Event, begun: threading.Event) -> Iterator[Server]:
    """Endpoints that take and return memory, with small pools."""
    provider = Provider(base_path, device="cpu", pool=SMALL)

    @provider.share(cache=False)
    def full(value: float, size: int = 64) -> torch.Tensor:
        return torch.full((size,), value)

    @provider.share(cache=False)
    def many(count: int) -> list[torch.Tensor]:
        return [torch.zeros(4) for _ in range(count)]

    @provider.share(cache=False)
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    @provider.share(cache=False)
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    @provider.share(cache=False)
    def slow(x: torch.Tensor, size: int) -> torch.Tensor:
        begun.set()
        assert go.wait(30)
        return torch.zeros(size)

    @provider.share()
    def kept() -> torch.Tensor:
        return torch.ones(4)

    with Server(provider) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client with a small pool."""
    with Client(socket_path=server.socket_path, timeout=10.0, pool=SMALL) as client:
        yield client


def chunks(server: Server) -> int:
    """Return the number of chunks of results in use."""
    return int(server.info()["pools"]["chunks"])


def test_clients_that_exit_during_calls_leave_nothing(server: Server, children: list[Child]) -> None:
    """The server copies results into pools that are being closed."""
    code = f"""
        import os, threading
        from shared_rpc import Client
        from shared_rpc.memory.pool import PoolOptions
        client = Client(socket_path={server.socket_path!r}, pool=PoolOptions(initial=1 << 20, limit=8 << 20))
        def ask():
            while True:
                client.call("full", 1.0, 1 << 18)
        client.call("full", 1.0)
        for _ in range(4):
            threading.Thread(target=ask, daemon=True).start()
        threading.Timer(0.3, lambda: os._exit(0)).start()
    """
    for _ in range(3):
        children.append(python(code))
    for child in children:
        child.close()
    eventually(lambda: server.info()["pools"] == {"nbytes": 0, "chunks": 0} and server.info()["running"] == 0)


def test_failing_calls_return_their_arguments(client: Client, server: Server) -> None:
    """With the next call: neither errors nor other answers return chunks."""
    for _ in range(20):
        with pytest.raises(ValueError, match="no"):
            client.call("refuses", torch.ones(MIB // 2))
        client.get_server_info()
        with suppress(Exception):
            client.get_buffer("nothing")
    assert client.call("full", 3.0)[0] == 3


def test_a_result_used_as_an_argument_stays_until_its_call_ends(
    client: Client, server: Server, go: threading.Event, begun: threading.Event
) -> None:
    """A call that waits for its memory gets it then."""
    held = [client.call("full", 1.0, MIB // 2) for _ in range(4)]
    client._timeout = 0.2
    with pytest.raises(DeadlineExceeded):
        client.call("slow", held.pop(), 4)
    client._timeout = 20.0
    got: list[torch.Tensor] = []
    waiting = threading.Thread(target=lambda: got.append(client.call("full", 2.0, MIB // 2)))
    waiting.start()
    eventually(lambda: server.info()["builds"] == 6)
    go.set()
    waiting.join(10)
    assert got[0][0] == 2


@pytest.mark.asyncio
async def test_cancelled_calls_leave_no_chunks(server: Server) -> None:
    """Whenever they are cancelled, even at the reply."""
    async with AsyncClient(socket_path=server.socket_path, pool=SMALL) as client:
        await client.call("many", 50)
        for number in range(60):
            call = asyncio.create_task(client.call("many", 50))
            await asyncio.sleep(number * 1e-4)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            del call  # which has a result, if it was too late

        left = 0
        for _ in range(100):
            await client.call("full", 1.0)
            await asyncio.sleep(0.01)
            left = chunks(server)
            if left <= 2:
                break
        assert left <= 2


def test_an_object_cannot_be_claimed_as_a_pool(server: Server, client: Client) -> None:
    """The claim is refused, and the object is unaffected."""
    mine = client.call("kept")
    with Raw(server.socket_path) as raw:
        result = raw.ask(m.Call("kept"))
        assert isinstance(result, m.Result)
        table = TensorTable(("cpu",), (StorageEntry(0, 0, 16, 0, 777),), (TensorEntry(0, "float32", 0, (4,), (1,)),))
        packed = msgspec.Raw(msgspec.msgpack.encode(table))
        reference = [encode(TensorRef(0))] * 2
        error = raw.ask(m.Call("add", reference, table=packed, segments=result.segments, kept=[0], chunks=[777]))
        assert isinstance(error, m.Error)
        assert (error.code, "belongs to no pool" in error.text) == ("codec", True)
    found = MAPPINGS.find(mine.data_ptr())
    assert found is not None
    assert not found[0].pooled
