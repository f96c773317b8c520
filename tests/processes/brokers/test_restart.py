"""A broker is killed and restarted without stored state: clients reconnect to the next one by themselves."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch

from shared_rpc import AsyncClient, errors
from tests.kit.brokers import BrokerApp, begun
from tests.kit.processes import eventually, sigstop


def test_waiting_clients_see_no_gap(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """With a ``connect_timeout``, a call that begins without a broker is answered by the next one."""
    broker = app.start()
    client = app.connect(connect_timeout=20)
    client.ping()
    broker.kill()
    waiting = [threads.submit(client.call, "model", 9), threads.submit(anyio.run, _call_async, app.base_path)]
    app.start()
    for call in waiting:
        assert call.result(20).weight[0, 0] == 9


async def _call_async(base_path: str) -> Any:
    async with AsyncClient(base_path, device="cpu", connect_timeout=20) as client:
        return await client.call("model", 9)


def test_unsent_requests_go_to_the_next_broker(app: BrokerApp) -> None:
    """The broker ended before a byte was written: any request is repeated, including memory in arguments."""
    broker = app.start()
    client = app.connect()
    x = torch.arange(5000.0)
    client.call("echo", x)
    for ask in (lambda: client.call("echo", x), lambda: client.call("model"), lambda: client.submit("model", 8)):
        broker.kill()
        broker = app.start()
        ask()
    assert torch.equal(client.call("echo", x), x)


def test_sent_calls_are_not_repeated(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path) -> None:
    """It may have been executed, so its caller gets an error."""
    broker = app.start()
    client = app.connect(connect_timeout=20)
    calls = [
        threads.submit(client.call, "slow", str(tmp_path / "go")),
        threads.submit(anyio.run, _slow_async, app.base_path, str(tmp_path / "go")),
    ]
    eventually(begun(tmp_path / "go"))
    eventually(lambda: client.get_server_info()["joined"] == 1)
    broker.kill()
    app.start()
    for call in calls:
        with pytest.raises(errors.ConnectionClosed):
            call.result(20)
    assert client.get_server_info()["calls"] == 0


async def _slow_async(base_path: str, path: str) -> Any:
    async with AsyncClient(base_path, device="cpu", connect_timeout=20) as client:
        return await client.call("slow", path)


@pytest.mark.asyncio
async def test_sent_queries_are_repeated(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """They change nothing, so the next broker answers them."""
    broker = app.start()
    clients = [app.connect(connect_timeout=20) for _ in range(3)]
    answers: list[Any] = []
    async with AsyncClient(app.base_path, device="cpu", connect_timeout=20) as other:
        for client in clients:
            client.ping()
        await other.ping()
        assert other._link is not None
        sockets = [each._link._socket for each in (other, *clients) if each._link is not None]
        before = [each.written for each in sockets]
        sigstop(broker.pid)
        asked = [
            threads.submit(question)
            for question in (clients[0].get_server_info, clients[1].list_endpoints, clients[2].list_objects)
        ]
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                answers.append(await other.get_server_info())

            group.start_soon(ask)
            await anyio.to_thread.run_sync(
                lambda: eventually(lambda: all(now.written > then for now, then in zip(sockets, before, strict=True)))
            )
            broker.kill()
            await anyio.to_thread.run_sync(app.start)
    assert [type(answer) for answer in answers] == [dict]
    assert [type(answer.result(20)) for answer in asked] == [dict, dict, list]


@pytest.mark.asyncio
async def test_handles_of_an_earlier_broker_are_stale(app: BrokerApp) -> None:
    """With the reason; their tensors stay valid, and releasing them is harmless."""
    broker = app.start()
    client = app.connect()
    async with AsyncClient(app.base_path, device="cpu") as other:
        mine, theirs = client.call("held"), await other.call("held", 5)
        broker.kill()
        app.start()
        with pytest.raises(errors.StaleHandleError) as stale:
            client.ensure_handle_live(mine)
        assert stale.value.reason == "server_changed"
        with pytest.raises(errors.StaleHandleError) as stale:
            await other.ensure_handle_live(theirs)
        assert stale.value.reason == "server_changed"
        assert (mine.value.sum(), theirs.value.sum()) == (28, 35)
        again = client.call("held")
        mine.release()
        await theirs.release()
        assert not again.is_stale()
        assert client.get_server_info()["leases"] == 1
