"""A stopped worker or server, as under a debugger: the broker's queue for a worker is limited; clients do not wait longer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server, errors
from shared_rpc.broker import dispatch as dispatch_module
from shared_rpc.broker.dispatch import Backlog
from shared_rpc.client.exchange import PROMPT
from shared_rpc.errors import DeadlineExceeded
from shared_rpc.execution.run import Run
from shared_rpc.memory.records import Arguments
from shared_rpc.memory.segments import Segment
from shared_rpc.protocol.specs import EndpointSpec
from tests.kit.brokers import BrokerApp, fds_of, private_memory, worker_pids
from tests.kit.processes import Child, eventually, sigstop

#: More than the capacity of a socket that is not read.
LARGE = "x" * 4_000_000


def cancel_calls(broker_app: BrokerApp, count: int, *tensors: torch.Tensor) -> None:
    """Make calls with large arguments, each of which is cancelled once the broker has received it."""
    watching = broker_app.connect()

    def received() -> bool:
        return any(run["calls"] for run in watching.list_runs())

    async def main() -> None:
        async with AsyncClient(broker_app.base_path, device="cpu") as client:
            for _ in range(count):
                call = asyncio.ensure_future(client.call("echo", [LARGE, *tensors]))
                await asyncio.to_thread(eventually, received, 30.0)
                call.cancel()
                await asyncio.wait([call])
                await asyncio.to_thread(eventually, lambda: not received(), 30.0)

    asyncio.run(main())
    watching.close()


@pytest.fixture
def stop(broker_app: BrokerApp) -> Iterator[Callable[[], int]]:
    """``stop()`` stops the first worker and fills its socket; returns its process id."""
    stopped: list[int] = []

    def make() -> int:
        client = broker_app.connect()
        client.call("model")
        stopped.append(worker_pids(client)[0])
        client.close()
        sigstop(stopped[-1])
        cancel_calls(broker_app, 1, torch.ones(1))
        return stopped[-1]

    yield make
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_cancelled_calls_leave_nothing(broker_app: BrokerApp, stop: Callable[[], int]) -> None:
    """Neither their descriptors nor their bytes stay in the broker; when the worker continues, calls are answered."""
    broker = broker_app.start(preload=False)  # a zygote is started late, and has descriptors
    client = broker_app.connect()
    pid = stop()
    fds, memory = fds_of(broker.pid), private_memory(broker.pid)
    for _ in range(5):
        cancel_calls(broker_app, 4, torch.ones(1000), torch.ones(3_000_000))
    eventually(lambda: fds_of(broker.pid) <= fds, what="descriptors are closed")
    assert private_memory(broker.pid) - memory < 30 << 20  # 80 MB were sent
    assert client.get_server_info()["workers"][0]["runs"] == 1
    assert client.call("model").weight[0, 0] == 4
    os.kill(pid, signal.SIGCONT)
    assert client.call("echo", torch.ones(3)).sum() == 3
    eventually(lambda: client.get_server_info()["workers"][0]["runs"] == 0)


def test_calls_wait_until_a_worker_reads(
    broker_app: BrokerApp, stop: Callable[[], int], threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """They are answered by the next one, if this one is killed."""
    client = broker_app.serve()
    pid = stop()
    calls = [threads.submit(client.call, "echo", torch.full((3_000_000,), float(number))) for number in range(8)]
    eventually(lambda: len(client.list_runs()) >= 8)
    os.kill(pid, signal.SIGKILL)
    assert [call.result(30)[0] for call in calls] == list(range(8))


def test_calls_go_to_a_worker_that_reads(
    broker_app: BrokerApp, stop: Callable[[], int], threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path
) -> None:
    """One of two is stopped: once its socket is full it gets no calls, although the other one has more to do."""
    client = broker_app.serve(options={"workers": 2})
    eventually(lambda: all(worker["state"] == "ready" for worker in client.get_server_info()["workers"]))
    pid = stop()
    slow = [threads.submit(client.call, "slow", str(tmp_path / "go"), key) for key in range(3)]
    assert pid not in {int(client.call("pid")) for _ in range(5)}
    (tmp_path / "go").touch()
    assert [call.result(20) for call in slow] == [0, 0, 0]


def test_calls_beyond_the_limit_fail_at_once(broker_app: BrokerApp, stop: Callable[[], int]) -> None:
    """With an error that names the worker. Queued calls continue with the worker."""
    broker_app.start_program(broker_app.program("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))"))
    pid = stop()

    async def main() -> list[Any]:
        async with AsyncClient(broker_app.base_path, device="cpu") as client:
            calls = [asyncio.ensure_future(client.call("echo", torch.full((10,), float(number)))) for number in range(160)]
            ended = asyncio.as_completed(calls)
            for _ in range(10):
                with suppress(errors.ServerBusy):
                    await next(ended)
            os.kill(pid, signal.SIGCONT)
            return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(main())
    refused = [str(result) for result in results if isinstance(result, errors.ServerBusy)]
    assert len(refused) == 10
    assert all(f"at most 150 descriptors): worker {pid} does not read" in text for text in refused)
    assert sum(isinstance(result, torch.Tensor) and result[0] == number for number, result in enumerate(results)) == 150


def run(*, nbytes: int = 0, segments: int = 0) -> Run[None]:
    """Return a run whose arguments have this many bytes and descriptors."""
    arguments = Arguments(segments=cast("list[Segment]", [None] * segments), nbytes=nbytes)
    return Run(EndpointSpec("f"), None, arguments)


@pytest.mark.parametrize("unit", ["calls", "bytes", "descriptors"])
def test_backlogs_are_limited(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls, bytes and descriptors, for all providers together; a removed run no longer counts."""
    monkeypatch.setattr(dispatch_module, "open_limit", lambda: 16)
    held: Counter[str] = Counter()
    backlog, other = (Backlog(held, runs=4 if unit == "calls" else 100, nbytes=400) for _ in range(2))
    size = {"bytes": {"nbytes": 100}, "descriptors": {"segments": 1}}.get(unit, {})
    runs = [run(**size) for _ in range(4)]
    for each in runs:
        backlog.check(each, "")
        backlog.add(each)
    with pytest.raises(errors.ServerBusy, match=rf"at most \d+ {unit}\): because"):
        other.check(run(**size), "because")
    assert backlog.remove(runs[1])
    assert not backlog.remove(runs[1])
    other.check(run(**size), "")
    assert list(backlog) == [runs[0], runs[2], runs[3]]


@pytest.fixture
def stopping_server(broker_app: BrokerApp) -> Child:
    """A server of another process."""
    return broker_app.start_script()


def leases(client: Client) -> int:
    """Return the leases on objects of a server."""
    return client.get_server_info()["leases"]


def test_dropped_handles_delay_no_other(stopping_server: Child, broker_app: BrokerApp, base_path: str) -> None:
    """A lease of another server ends at once, and that of the stopped one when it continues."""
    provider = Provider(f"{base_path}-other", device="cpu")
    provider.share("held", managed=True)(lambda: torch.ones(3))
    stopped = broker_app.connect()
    with Server(provider), Client(f"{base_path}-other", device="cpu") as other:
        first, second, third = stopped.call("held"), stopped.call("held"), other.call("held")
        sigstop(stopping_server.pid)
        del first, second, third
        eventually(lambda: leases(other) == 0, seconds=60)
    os.kill(stopping_server.pid, signal.SIGCONT)
    eventually(lambda: leases(stopped) == 0, seconds=60)


@pytest.mark.parametrize("operation", [Client.ping, lambda client: next(client.refreshes())], ids=["ping", "refreshes"])
def test_client_timeouts_hold(stopping_server: Child, broker_app: BrokerApp, operation: Callable[[Client], object]) -> None:
    """An operation ends soon after its timeout, although the server does not confirm the cancellation."""
    client = broker_app.connect(timeout=0.5)
    client.ping()
    sigstop(stopping_server.pid)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        operation(client)
    assert time.monotonic() - begin < PROMPT
    os.kill(stopping_server.pid, signal.SIGCONT)


def test_reconnections_end_in_time(stopping_server: Child, broker_app: BrokerApp, base_path: str) -> None:
    """With the error of the new connection, not with that of the earlier one."""

    async def main() -> None:
        async with AsyncClient(base_path, device="cpu", timeout=0.5) as client:
            await client.ping()
            sigstop(stopping_server.pid)
            client._link.close("the network is down")
            with pytest.raises(errors.ConnectError, match="in time"):
                await client.ping()
            os.kill(stopping_server.pid, signal.SIGCONT)
            await client.ping()

    asyncio.run(main())
