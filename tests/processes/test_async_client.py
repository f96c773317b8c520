"""The async client, on asyncio and on trio: the blocking client's surface, concurrent calls, and cancellation."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import shared_rpc
from shared_rpc import AsyncClient, AsyncHandle, Provider, Server, TaskInfo
from shared_rpc.errors import (
    ConnectError,
    ConnectionClosed,
    DeadlineExceeded,
    StaleHandleError,
)
from tests.kit.apps import Serve
from tests.kit.processes import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("warm")]


@pytest.fixture
def server(provider: Provider, serve: Serve, go: threading.Event) -> Server:
    """A server of the endpoints of these tests."""

    provider.share("load", managed=True)(lambda size: torch.ones((size,)))

    @provider.share(cache=False)
    def hold(value: int) -> torch.Tensor:
        go.wait(30)
        return torch.full((1,), value)

    provider.share("add", cache=False)(lambda x, y: x + y)
    provider.share("deep")(lambda layers: torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(layers)]))

    @provider.share
    def fail() -> torch.Tensor:
        raise KeyError("missing")

    @provider.share(execution="task", managed=True)
    def build(steps: int) -> torch.Tensor:
        for step in range(steps):
            shared_rpc.progress(step + 1, steps)
        go.wait(30)
        return torch.ones(steps)

    return serve()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    """A client of that server."""
    async with AsyncClient(socket_path=server.socket_path, connect_timeout=0) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread while the loop runs."""
    await anyio.to_thread.run_sync(eventually, condition)


async def test_the_timeout_includes_connecting(tmp_path: Path) -> None:
    """Also for a coroutine that waits until another one has connected."""
    begin = time.monotonic()
    async with AsyncClient(socket_path=tmp_path / "none", timeout=0.3, connect_timeout=60) as client:

        async def refused() -> None:
            with pytest.raises(ConnectError):
                await client.ping()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refused)
            tasks.start_soon(refused)
    assert time.monotonic() - begin < 30


async def test_handles_are_async_context_managers(client: AsyncClient, server: Server) -> None:
    """The lease is released at the end of the block, however it ends."""
    async with await client.call("load", 3) as handle:
        assert isinstance(handle, AsyncHandle)
        assert handle.value.tolist() == [1, 1, 1]
        assert (await handle.get_object_info())["leases"] == 1
    assert handle.released and server.info()["leases"] == 0
    with anyio.CancelScope() as scope:
        async with await client.call("load", 3):
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert server.info()["leases"] == 0


async def test_rebuilding_does_not_block_the_loop(client: AsyncClient) -> None:
    """A large module is rebuilt in a thread; an existing one is returned at once."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        model = await client.call("deep", 1500)
        during = ticks
        group.cancel_scope.cancel()
    assert during > 5
    assert await client.call("deep", 1500) is model


async def test_tasks_work_in_coroutines(client: AsyncClient, go: threading.Event) -> None:
    """Submitted, watched by a callback that may be a coroutine function, and fetched."""
    task_id = await client.execute("build", 3, wait=False)
    seen: list[Any] = []

    async def watch(info: TaskInfo) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append((info.status.value, info.progress.done if info.progress else None))
        if seen[-1] == ("running", 3):
            go.set()

    with pytest.raises(DeadlineExceeded):
        await client.wait_for_task(task_id, 0.05)
    async with await client.wait_for_task(task_id, callback=watch) as handle:
        assert handle.value.tolist() == [1, 1, 1]
    assert seen[-1] == ("completed", 3) and ("running", 3) in seen
    assert (await client.get_task_status(task_id)).status == "completed"
    assert (await client.execute("build", 3)).value.tolist() == [1, 1, 1]


async def test_a_restarted_server_is_found(server: Server, client: AsyncClient) -> None:
    """Waiters get an error; the next request finds the new server, and an old handle is stale."""
    handle = await client.call("load", 2)
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(ConnectionClosed):
                await client.call("hold", 1)

        group.start_soon(wait)
        await until(lambda: server.info()["running"] == 1)
        server.stop()
    server.start()
    with pytest.raises(StaleHandleError) as caught:
        await client.ensure_handle_live(handle)
    assert caught.value.reason == "server_changed"


async def test_closing_a_client_ends_its_waits(server: Server) -> None:
    """Waiters get an error, every later operation fails, and the leases are released."""
    client = AsyncClient(socket_path=server.socket_path)
    handle = await client.call("load", 2)
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(ConnectionClosed, match="this client was closed"):
                await client.call("hold", 1)

        group.start_soon(wait)
        await until(lambda: server.info()["running"] == 1)
        await client.close()
    with pytest.raises(ConnectionClosed, match="this client is closed"):
        await client.ping()
    await until(lambda: server.info()["leases"] == 0)
    await handle.release()
