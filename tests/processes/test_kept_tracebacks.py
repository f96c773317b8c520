"""Log collectors that keep exceptions with their tracebacks: frames of the library in them keep no memory alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared_rpc import Provider
from shared_rpc.memory.mapping import MAPPINGS
from tests.kit.apps import Connect, Serve
from tests.kit.processes import eventually

#: The contents of a log collector.
COLLECTED: list[BaseException] = []


@pytest.fixture(autouse=True)
def empty_collector(no_leaks: None) -> Iterator[None]:
    """The collector is empty before and after."""
    COLLECTED.clear()
    yield
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


def tensor() -> torch.Tensor:
    """Return memory of an endpoint that collects garbage itself, above the frames of the server."""
    collect()
    return torch.ones(1 << 20)


@pytest.mark.parametrize("endpoint", [module, tensor])
def test_released_objects_are_unmapped(provider: Provider, serve: Serve, connect: Connect, endpoint: Any) -> None:
    """Despite retained errors that were caught when the object was made, published or rebuilt, with the frames around them."""
    gc.collect()
    MAPPINGS.drain()
    before = len(MAPPINGS)
    provider.share("made", managed=True, cache=False)(endpoint)
    serve()
    client = connect()
    with client.call("made") as handle:
        connect().open_ticket(handle.ticket()).release()
    client.execute("made").release()
    del handle
    assert COLLECTED and all(error.__traceback__ is not None for error in COLLECTED)

    def are_unmapped() -> bool:
        gc.collect()
        MAPPINGS.drain()
        return len(MAPPINGS) <= before

    eventually(are_unmapped)
