"""Log collectors that keep exceptions with their tracebacks: frames of the library in them keep no memory alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shared_rpc import Provider, Server
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.apps import Connect, Serve
from tests.kit.processes import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")

#: The contents of a log collector.
COLLECTED: list[BaseException] = []


@pytest.fixture(autouse=True)
def nothing_is_kept(no_leaks: None) -> Iterator[Callable[[], bool]]:
    """``nothing_is_kept()`` returns whether no memory of this test is mapped; the collector is empty before and after."""
    COLLECTED.clear()
    gc.collect()
    MAPPINGS.drain()
    before = len(MAPPINGS)

    def check() -> bool:
        gc.collect()
        MAPPINGS.drain()
        return len(MAPPINGS) <= before

    yield check
    COLLECTED.clear()


def collect() -> None:
    """Act like libraries with optional modules: try to import one, and log that it is missing."""
    try:
        import a_module_that_there_is_not  # noqa: F401
    except ImportError as error:
        COLLECTED.append(error)


class Part:
    """An attribute of a module. It collects garbage when it is pickled, and when it is rebuilt."""

    def __reduce__(self) -> tuple[Any, ...]:
        collect()
        return make_part, ()


def make_part() -> Part:
    """Rebuild it: foreign code, whose frame has no reference to the module."""
    collect()
    return Part()


def module() -> torch.nn.Module:
    """Return a module with such a part, large enough that the garbage collector is paused for it."""
    module = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(60))
    module.part = Part()
    return module


@pytest.fixture
def server(provider: Provider, serve: Serve) -> Server:
    """A server of models whose classes collect garbage."""

    provider.share("module", managed=True, cache=False)(module)

    @provider.share(managed=True, cache=False)
    def collecting(size: int) -> torch.Tensor:
        collect()
        return torch.ones(size)

    return serve()


Check = Callable[[], bool]


def test_released_objects_are_unmapped(server: Server, connect: Connect, nothing_is_kept: Check) -> None:
    """Despite a retained error that was caught during the rebuild, with the frames around it."""
    client = connect()
    with client.call("module") as first:
        connect().open_ticket(first.ticket()).release()
        del first
    client.execute("module").release()
    assert len(COLLECTED) > 2 and all(error.__traceback__ is not None for error in COLLECTED)
    eventually(nothing_is_kept)


def test_results_of_an_endpoint_are_freed(server: Server, connect: Connect, nothing_is_kept: Check) -> None:
    """The server's own frames are below those of an endpoint whose errors are retained."""
    connect().call("collecting", 1 << 20).release()
    assert COLLECTED
    eventually(nothing_is_kept)
