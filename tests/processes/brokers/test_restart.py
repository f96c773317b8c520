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


def test_sent_queries_are_repeated(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """They change nothing, so the next broker answers them."""
    broker = app.start()
    client = app.connect(connect_timeout=20)
    client.ping()
    assert client._link is not None
    socket = client._link._socket
    before = socket.written
    sigstop(broker.pid)
    asked = threads.submit(client.get_server_info)
    eventually(lambda: socket.written > before)
    broker.kill()
    app.start()
    assert asked.result(20)["objects"] == 0
