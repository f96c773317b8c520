"""Calls of microseconds: endpoints on the server's loop, and arguments that come back as results."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.context import CURRENT_RUN
from shared_rpc.memory.pool import PoolOptions
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.values import DtypeRef, encode
from tests.kit.raw import Raw

MIB = 1 << 20
#: Elements of a float32 tensor.
LARGE = MIB // 8
SMALL = PoolOptions(initial=MIB, limit=8 * MIB)

KINDS = pytest.mark.parametrize("kind", ["", "a"], ids=["def", "async def"])


@pytest.fixture
def kept() -> list[Any]:
    """What the endpoints keep of their arguments, and of themselves: nothing yet."""
    return []


@pytest.fixture
def server(
    device: str, no_leaks: None, base_path: str, kept: list[Any], begun: threading.Event, go: threading.Event
) -> Iterator[Server]:
    """Each function as an endpoint of either kind: ``echo`` and ``aecho``."""
    provider = Provider(base_path, device=device)

    def share(function: Callable[..., Any], **options: Any) -> None:
        @functools.wraps(function)
        async def on_the_loop(*args: Any) -> Any:
            return function(*args)

        provider.share(function.__name__, cache=False, **options)(function)
        provider.share(f"a{function.__name__}", cache=False, **options)(on_the_loop)

    def full(value: float, size: int = 64) -> torch.Tensor:
        return torch.full((size,), value, device=device)

    def echo(x: torch.Tensor) -> torch.Tensor:
        return x

    def plain(x: torch.Tensor) -> torch.Tensor:
        return 5

    def in_turn(size: int) -> torch.Tensor:
        return torch.zeros(size, device=device)

    for function in (full, echo, plain):
        share(function)
    share(in_turn, concurrency="serialized")

    @provider.share(cache=False)
    async def patient() -> None:
        begun.set()
        await asyncio.Event().wait()

    @provider.share(cache=False, concurrency="serialized")
    async def gated(dtype: torch.dtype) -> None:
        begun.set()
        await asyncio.to_thread(go.wait, 30)

    @provider.share(cache=False)
    async def where() -> torch.Tensor:
        kept.append((threading.current_thread().name, CURRENT_RUN.get() is not None, asyncio.current_task()))
        return torch.ones(1, device=device)

    with Server(provider, pool=SMALL) as server:
        yield server
    kept.clear()
    gc.collect()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client with a small pool, whose server has loaded what it needs."""
    with Client(socket_path=server.socket_path, timeout=30.0, pool=SMALL) as client:
        client.call("full", 1.0)
        yield client


def numbers(device: str, size: int = LARGE) -> torch.Tensor:
    """Each element another one."""
    return torch.arange(float(size), device=device)


# On the loop.


def test_an_async_endpoint_runs_on_the_loop(client: Client, kept: list[Any]) -> None:
    """In a task of its own, with its run as the current one."""
    for _ in range(3):
        assert client.call("where").tolist() == [1.0]
    names, runs, tasks = zip(*kept, strict=True)
    assert set(names) == {"shared-rpc-server"}
    assert set(runs) == {True}
    assert len(set(tasks)) == 3


@pytest.mark.parametrize("size", [1, 1000, MIB // 4, MIB], ids=["bytes", "pooled", "over a MiB", "a segment"])
def test_results_of_every_size(client: Client, size: int) -> None:
    """Whether they need a thread or not; all are held, and stay as they were."""
    results = [client.call("afull", float(value), size) for value in range(3)]
    assert [result.unique().tolist() for result in results] == [[float(value)] for value in range(3)]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [8, "no number"], ids=["that succeed", "that fail"])
async def test_a_long_line(server: Server, client: Client, size: Any) -> None:
    """Hundreds of calls that wait for their turn end one after the other, whatever becomes of each."""
    async with AsyncClient(socket_path=server.socket_path, pool=SMALL) as asynchronous:
        calls = [asynchronous.call("ain_turn", size) for _ in range(600)]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} == {torch.Tensor if size == 8 else TypeError}


def test_a_long_line_of_calls_that_cannot_be_loaded(
    server: Server, client: Client, begun: threading.Event, go: threading.Event
) -> None:
    """Each of them ends as its turn comes, and the stack is no deeper for it."""
    with Raw(server.socket_path) as raw:
        raw.say(m.Call("gated", [encode(DtypeRef("float32"))]), 1)
        assert begun.wait(10)
        for number in range(2, 1002):
            raw.say(m.Call("gated", [encode(DtypeRef("float33"))]), number)
        go.set()
        answers = [raw.hear() for _ in range(1001)]
    assert isinstance(answers[0], m.Result)
    assert {answer.code for answer in answers[1:] if isinstance(answer, m.Error)} == {"codec"}


# An argument that comes back.


@KINDS
def test_an_argument_that_comes_back_is_copied(client: Client, device: str, kind: str) -> None:
    """The result is a value: neither side's other tensors share its memory."""
    x = numbers(device)
    result = client.call(f"{kind}echo", x)
    x.zero_()
    assert torch.equal(result, numbers(device))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
class TestOnTheGpu:
    """The loop is not held up, and streams are joined."""

    @pytest.fixture
    def busy(self, server: Server, kept: list[Any]) -> None:
        """Endpoints whose work takes some 50 ms."""

        @server._provider.share(cache=False)
        async def late(value: float, size: int) -> torch.Tensor:
            result = torch.zeros(size, device="cuda")
            torch.cuda._sleep(100_000_000)
            return result.fill_(value)

        @server._provider.share(cache=False)
        def aside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)
                y.copy_(x, non_blocking=True)
            kept.append(y)
            return x

    def test_others_are_answered_meanwhile(self, server: Server, client: Client, busy: None) -> None:
        """The loop waits for a hundred microseconds, and a thread for the rest."""
        client.call("late", 1.0, 10)
        with Client(socket_path=server.socket_path) as other:
            other.ping()
            call = threading.Thread(target=lambda: [client.call("late", 1.0, 10) for _ in range(20)])
            call.start()
            times = [other.ping() for _ in range(200)]
            call.join()
        assert sorted(times)[100] < 0.01

    def test_an_argument_that_another_stream_still_reads(self, client: Client, busy: None, kept: list[Any]) -> None:
        """The memory is not used again before it has read it, though the caller has dropped its result."""
        y = torch.zeros(LARGE, device="cuda")
        for value in range(1, 4):
            x = torch.full((LARGE,), float(value), device="cuda")
            client.call("aside", x, y)
            for _ in range(4):
                client.call("echo", torch.zeros_like(x))
        torch.cuda.synchronize()
        assert [y.unique().tolist() for y in kept] == [[1.0], [2.0], [3.0]]
