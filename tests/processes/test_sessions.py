"""Clients and their sessions: shared by threads and coroutines, returned however the process or the client ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import shared_rpc
from shared_rpc import AsyncClient, AsyncHandle, Client, Server, TaskInfo
from shared_rpc.client.link import BlockingLink
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.processes import eventually, open_fds
from tests.kit.world import World

#: A client process without torch: hold() takes a lease on an object that it does not map.
HOLDER = """
import os, signal, sys
from shared_rpc import Client
from shared_rpc.protocol import messages as m

client = Client(device="cpu")

def hold():
    reply, _ = client._run(client._sent(m.Call, "kept", (3,), {}, "kept"))
    reply.frame.close()
"""


@pytest.fixture
def world(world: World, go: threading.Event, begun: threading.Event) -> World:
    """A server in this process."""
    world.share("kept", managed=True)(lambda size: torch.ones((size,)))
    world.share("own", managed=True, cache=False)(lambda size: torch.ones((size,)))
    world.share("doubled", cache=False)(lambda x: x * 2)
    world.share("deep")(lambda layers: torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(layers)]))

    @world.share(managed=True)
    def slow(size: int) -> torch.Tensor:
        begun.set()
        shared_rpc.progress(1, 2)
        go.wait(30)
        return torch.ones(size)

    world.serve()
    return world


def holders(client: Client) -> list[int]:
    """Return the pids of all holders."""
    return sorted(holder["pid"] for stored in client.list_objects() for holder in stored["holders"])


def test_closing_the_client_releases_all_leases(world: World, client: Client) -> None:
    """At once; tensors stay valid; later operations give the reason."""
    handles = [client.call("own", size) for size in (1, 2, 3)]
    tensors = [handle.value for handle in handles]
    client.close()
    eventually(lambda: world.server.info()["leases"] == 0, seconds=1)
    assert [int(tensor.sum()) for tensor in tensors] == [1, 2, 3]
    for handle in handles:
        handle.release()
    with pytest.raises(ConnectionClosed, match="this client is closed"):
        client.ping()
    client.close()


def test_forked_children_have_their_own_sessions(world: World, client: Client) -> None:
    """And leases; they do not keep those of their parent, which end when it is killed."""
    parent = world.process(
        HOLDER
        + """
hold()
if os.fork() == 0:
    hold()
    print("child holds", os.getpid())
    sys.stdin.readline()
    os._exit(0)
signal.pause()
"""
    )
    child = int(parent.expect("child holds").split()[-1])
    assert holders(client) == sorted([parent.pid, child])
    os.kill(parent.pid, signal.SIGKILL)
    eventually(lambda: holders(client) == [child], seconds=1)
    parent.tell("end, child")
    eventually(lambda: holders(client) == [], seconds=1)


# Threads, and calls that end early.


def test_threads_wait_for_a_slow_connection_of_another_one(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with ``connect_timeout=0``: that is the time for a server to listen."""
    connect = BlockingLink.open

    def slowly(path: str, timeout: float) -> BlockingLink:
        time.sleep(0.3)
        return connect(path, timeout)

    monkeypatch.setattr(BlockingLink, "open", slowly)
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda _: client.ping(), range(3)))


def test_closing_a_client_ends_its_wait_for_a_server(tmp_path: Path) -> None:
    """Also in threads that wait for the one that connects."""
    client = Client(tmp_path / "none", device="cpu", connect_timeout=30.0)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.ping) for _ in range(2)]
        eventually(lambda: all(future.running() for future in waiting))
        client.close()
        for future in waiting:
            with pytest.raises(ConnectionClosed, match="this client is closed"):
                future.result(5)


def test_closing_a_client_that_many_threads_use(world: World) -> None:
    """Whenever it happens, every thread ends with an error that names the client, and nothing stays open."""
    for _ in range(5):
        client = world.client(connect_timeout=10.0)
        started = threading.Semaphore(0)

        def use(client: Client = client, started: threading.Semaphore = started) -> None:
            while True:
                client.call("own", 3).release()
                started.release()

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(use) for _ in range(4)]
            for _ in range(8):
                started.acquire()
            client.close()
            for future in futures:
                with pytest.raises(ConnectionClosed, match=r"this client (is|was) closed"):
                    future.result(timeout=5)
        eventually(lambda: world.server.info()["sessions"] == 0)
        eventually(lambda: world.server.info()["objects"] == 0)


def test_threads_with_timeouts_get_their_own_answers(world: World, client: Client, go: threading.Event) -> None:
    """A storm of calls that time out next to others: nothing is mixed up, and nothing is left."""

    def work(number: int) -> None:
        for turn in range(20):
            if (turn + number) % 4:
                with client.call("own", number + 1) as handle:
                    assert handle.value.shape == (number + 1,)
            else:
                with pytest.raises(DeadlineExceeded):
                    client.wait_for_task(task_id, 0.01)

    task_id = client.submit("slow", 1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    go.set()
    client.wait_for_task(task_id).release()
    eventually(lambda: world.server.info()["leases"] == 0)
    link = client._link
    assert link is not None and not link._exchanges.pending and not link._waiting and link._reader is None
    assert world.server.info()["sessions"] == 1


def test_a_timeout_keeps_the_session(
    world: World, client: Client, go: threading.Event, begun: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is abandoned, its run continues; the session, its other leases and the connection stay."""
    held = client.call("own", 3)
    with monkeypatch.context() as patch:
        patch.setattr(client, "_timeout", 0.2)
        with pytest.raises(DeadlineExceeded, match=r"slow\(\) took longer than its timeout") as caught:
            client.call("slow", 3)
    assert isinstance(caught.value, TimeoutError)  # users of Python's own exceptions need not know ours
    assert begun.wait(10)
    assert not held.is_stale()
    assert world.server.info()["sessions"] == 1
    go.set()
    assert client.call("slow", 3).value.sum() == 3
    assert world.server.info()["builds"] == 2


# Clients that are dropped without a close: the last reference ends the session, without the cyclic collector.


@pytest.fixture
def no_collector(no_leaks: None) -> Iterator[None]:
    """Only reference counts free objects."""
    gc.disable()
    yield
    gc.enable()


def await_end(server: Server) -> None:
    """Wait until the server has no session, and nothing that belonged to one."""
    eventually(lambda: not server.info()["sessions"], what="the session's end")
    assert server.info()["leases"] == 0


def test_a_dropped_client_ends_its_session(world: World, base_path: str, no_collector: None) -> None:
    """At once; a result stays valid, and then descriptors, mappings and pools of both sides are freed."""
    MAPPINGS.drain()
    descriptors, mappings = open_fds(), len(MAPPINGS)
    client = Client(base_path, device="cpu", timeout=30.0)
    result = client.call("doubled", torch.arange(1000))
    dropped = weakref.ref(client)
    del client
    assert dropped() is None
    await_end(world.server)
    assert result.sum() == 999000
    del result
    MAPPINGS.drain()
    eventually(lambda: (open_fds(), len(MAPPINGS)) == (descriptors, mappings))
    assert world.server.info()["pools"] == {"nbytes": 0, "chunks": 0}


def test_a_dropped_async_client_ends_its_session(world: World, base_path: str, anyio_backend: str, no_collector: None) -> None:
    """On its loop, without blocking it, and after the loop's end. Handles keep their client."""

    async def main() -> None:
        client = AsyncClient(base_path, device="cpu", timeout=30.0)
        handle = await client.call("kept", 3)
        dropped = weakref.ref(client)
        del client
        assert not await handle.is_stale()
        del handle
        await anyio.to_thread.run_sync(await_end, world.server)
        assert dropped() is None

    anyio.run(main, backend=anyio_backend)
    other = AsyncClient(base_path, device="cpu", timeout=30.0)
    anyio.run(other.ping, backend=anyio_backend)
    del other
    await_end(world.server)


# Coroutines.


@pytest.fixture
async def async_client(world: World) -> AsyncIterator[AsyncClient]:
    """A client of that server."""
    async with AsyncClient(socket_path=world.server.socket_path, connect_timeout=0) as client:
        yield client


@pytest.mark.anyio
async def test_the_timeout_includes_connecting(no_leaks: None, tmp_path: Path) -> None:
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


@pytest.mark.anyio
async def test_handles_are_async_context_managers(async_client: AsyncClient, world: World) -> None:
    """The lease is released at the end of the block, however it ends."""
    async with await async_client.call("kept", 3) as handle:
        assert isinstance(handle, AsyncHandle)
        assert handle.value.tolist() == [1, 1, 1]
        assert (await handle.get_object_info())["leases"] == 1
    assert handle.released and world.server.info()["leases"] == 0
    with anyio.CancelScope() as scope:
        async with await async_client.call("kept", 3):
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert world.server.info()["leases"] == 0


@pytest.mark.anyio
async def test_collected_handles_are_released(async_client: AsyncClient, world: World) -> None:
    """A garbage-collected handle releases its lease while its client is open."""
    await async_client.call("kept", 3)
    gc.collect()
    await anyio.to_thread.run_sync(eventually, lambda: world.server.info()["leases"] == 0)
    assert await async_client.ping() < 5


@pytest.mark.anyio
async def test_rebuilding_does_not_block_the_loop(async_client: AsyncClient) -> None:
    """A large module is rebuilt in a thread; an existing one is returned at once."""
    ticks = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        model = await async_client.call("deep", 1500)
        group.cancel_scope.cancel()
    assert len(ticks) > 5
    assert await async_client.call("deep", 1500) is model


@pytest.mark.anyio
async def test_tasks_work_in_coroutines(async_client: AsyncClient, go: threading.Event) -> None:
    """Submitted, watched by a callback that may be a coroutine function, and fetched."""
    task_id = await async_client.execute("slow", 3, wait=False)
    seen: list[Any] = []

    async def watch(info: TaskInfo) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append((info.status.value, info.progress.done if info.progress else None))
        if seen[-1] == ("running", 1):
            go.set()

    with pytest.raises(DeadlineExceeded):
        await async_client.wait_for_task(task_id, 0.05)
    async with await async_client.wait_for_task(task_id, callback=watch) as handle:
        assert handle.value.tolist() == [1, 1, 1]
    assert seen[-1] == ("completed", 1)
    assert (await async_client.get_task_status(task_id)).status == "completed"
    assert (await async_client.execute("slow", 3)).value.tolist() == [1, 1, 1]


@pytest.mark.anyio
async def test_closing_a_client_ends_its_waits(world: World, begun: threading.Event) -> None:
    """Waiters get an error, every later operation fails, and the leases are released."""
    client = AsyncClient(socket_path=world.server.socket_path)
    handle = await client.call("kept", 2)
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(ConnectionClosed, match="this client was closed"):
                await client.call("slow", 1)

        group.start_soon(wait)
        await anyio.to_thread.run_sync(begun.wait, 10)
        await client.close()
    with pytest.raises(ConnectionClosed, match="this client is closed"):
        await client.ping()
    await anyio.to_thread.run_sync(await_end, world.server)
    await handle.release()
