"""Log collectors that keep exceptions with their tracebacks: our frames, which a traceback reaches, keep no memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.errors import CodecError
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.processes import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")

#: What a log collector keeps.
COLLECTED: list[BaseException] = []


@pytest.fixture(autouse=True)
def collected(no_leaks: None) -> Iterator[list[BaseException]]:
    """The collector, empty before and after."""
    COLLECTED.clear()
    yield COLLECTED
    COLLECTED.clear()


def collect() -> None:
    """What libraries do with what is optional: they try it, and log that it is not there."""
    try:
        import a_module_that_there_is_not  # noqa: F401
    except ImportError as error:
        COLLECTED.append(error)


class Part:
    """Something in a module's attribute. It collects when it is taken apart, and when it is rebuilt."""

    def __reduce__(self) -> tuple[Any, ...]:
        collect()
        return make_part, ()


def make_part() -> Part:
    """Rebuild it. This frame is foreign code's, and has nothing of the module."""
    collect()
    return Part()


def module_of(parts: int) -> torch.nn.Module:
    """A module with such a part; with many others it is large enough for the garbage collector to be paused."""
    module = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(parts))
    module.part = Part()
    return module


class Broken(torch.nn.Linear):
    """A module that cannot be rebuilt."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ImportError("it needs another release of something")


#: How many mappings there were before the test, which an earlier one may keep.
EARLIER = 0


@pytest.fixture(autouse=True)
def mapped_before(collected: None) -> None:
    """What is left is this test's own."""
    global EARLIER
    gc.collect()
    MAPPINGS.drain()
    EARLIER = len(MAPPINGS)


def nothing_is_kept() -> bool:
    """Whether no memory of this test is mapped any more."""
    gc.collect()
    MAPPINGS.drain()
    return len(MAPPINGS) <= EARLIER


@pytest.fixture
def server(provider: Provider, serve: Callable[..., Server]) -> Server:
    """A server of models whose classes collect."""

    provider.share("small", managed=True, cache=False)(lambda: module_of(1))
    provider.share("large", managed=True, cache=False)(lambda: module_of(60))

    @provider.share(managed=True, cache=False)
    def broken() -> torch.nn.Module:
        return Broken(4, 4)

    @provider.share(managed=True, cache=False)
    def collecting(size: int) -> torch.Tensor:
        collect()
        return torch.ones(size)

    @provider.share(managed=True, cache=False)
    async def collecting_soon(size: int) -> torch.Tensor:
        collect()
        return torch.ones(size)

    @provider.share(cache=False)
    def weigh(module: torch.nn.Module) -> torch.Tensor:
        return torch.ones(1)

    return serve()


@pytest.mark.parametrize("endpoint", ["small", "large"])
@pytest.mark.parametrize("how", ["call", "task", "ticket"])
def test_an_object_goes_when_it_is_released(server: Server, connect: Callable[..., Client], endpoint: str, how: str) -> None:
    """Though an error that was caught while it was rebuilt lives on, and with it the frames around it."""
    client = connect()
    if how == "call":
        handle = client.call(endpoint)
    elif how == "task":
        handle = client.execute(endpoint)
    else:
        with client.call(endpoint) as first:
            ticket = first.ticket()
            handle = connect().open_ticket(ticket)
            del first
    assert COLLECTED and all(error.__traceback__ is not None for error in COLLECTED)
    handle.release()
    del handle
    eventually(nothing_is_kept)
    assert COLLECTED


@pytest.mark.parametrize("endpoint", ["small", "large"])
def test_an_object_of_the_asynchronous_client(server: Server, base_path: str, endpoint: str) -> None:
    """The same, on the loop and in its threads."""

    async def run() -> None:
        async with AsyncClient(base_path, device="cpu", connect_timeout=0) as client:
            handle = await client.call(endpoint)
            assert COLLECTED
            await handle.release()

    anyio.run(run)
    eventually(nothing_is_kept)
    assert COLLECTED


def test_an_object_that_cannot_be_rebuilt(server: Server, connect: Callable[..., Client]) -> None:
    """Whoever keeps the error, as a notebook's ``sys.last_value``, keeps no memory."""
    with pytest.raises(CodecError, match="another release of something") as caught:
        connect().call("broken")
    eventually(nothing_is_kept)
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize("endpoint", ["collecting", "collecting_soon"])
def test_what_an_endpoint_returns(server: Server, connect: Callable[..., Client], endpoint: str) -> None:
    """The server's own frames are below those of an endpoint, whose errors may be kept."""
    handle = connect().call(endpoint, 1 << 20)
    assert COLLECTED
    handle.release()
    del handle
    eventually(nothing_is_kept)


def test_an_argument_that_collects_when_it_is_lifted(server: Server, connect: Callable[..., Client]) -> None:
    """It goes with the call."""
    client = connect()
    client.call("weigh", module_of(1))
    assert COLLECTED
    client.close()
    eventually(nothing_is_kept)
