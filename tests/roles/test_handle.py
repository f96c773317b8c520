"""Handles: the same in every role, and what they know of their object."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared_rpc import Handle
from shared_rpc.errors import CapabilityError, StaleHandleError
from tests.kit.apps import App, shares_memory
from tests.kit.deep import deep
from tests.kit.processes import eventually


def test_managed_gives_a_handle(app: App) -> None:
    """``managed=True`` returns a handle that holds the value, in every role."""

    @app.share(managed=True)
    def load(size: int) -> torch.nn.Module:
        return torch.nn.Linear(size, size, bias=False)

    one, other = load(2), load(2)
    assert type(one) is type(other) is Handle
    assert isinstance(one.value, torch.nn.Linear)
    assert shares_memory(one.value.weight, other.value.weight)
    assert (one.object_id, one.server_id) == (other.object_id, other.server_id)
    assert (one.released, one.is_stale()) == (False, False)


def test_with_releases(app: App) -> None:
    """A handle is its own context manager; after the block, whatever ends it, its value is gone, and the error says why."""

    @app.share(managed=True)
    def load() -> torch.Tensor:
        return torch.ones(4)

    with pytest.raises(ZeroDivisionError), load() as handle:
        kept = handle.value
        raise ZeroDivisionError
    with pytest.raises(StaleHandleError, match=f"object {handle.object_id} was released") as caught:
        _ = handle.value
    assert caught.value.reason == "released"
    assert (handle.released, handle.is_stale()) == (True, True)
    assert torch.equal(kept, torch.ones(4))


def test_releasing_twice_gives_one_lease_back(app: App) -> None:
    """A second release is harmless: it does not take the lease of another handle."""

    @app.share(managed=True)
    def load() -> torch.Tensor:
        return torch.ones(1)

    one, other = load(), load()
    load.invalidate()
    one.release()
    one.release()
    assert not other.is_stale()
    assert other.get_object_info()["leases"] == 1


@pytest.mark.parametrize("way", ["release", "collection"])
def test_object_goes_with_its_last_handle(app: App, way: str) -> None:
    """An object that no cache keeps goes with the last handle, released or dropped."""
    built: list[weakref.ref[torch.nn.Module]] = []

    @app.share(managed=True, cache=False)
    def load() -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        built.append(weakref.ref(module))
        return module

    handle = load()
    gc.collect()
    assert built[0]() is not None
    if way == "release":
        handle.release()
    del handle

    def gone() -> bool:
        gc.collect()
        return built[0]() is None

    eventually(gone)


def test_invalidated_object_stays_with_its_holders(app: App) -> None:
    """Invalidation gives later callers a new object, of the next generation; earlier handles stay as they are."""

    @app.share(managed=True)
    def load() -> torch.Tensor:
        return torch.ones(4)

    old = load()
    load.invalidate()
    new = load()
    assert (old.generation, new.generation) == (1, 2)
    assert old.object_id != new.object_id
    assert not shares_memory(new.value, old.value)
    assert not old.is_stale()
    old.release()
    assert not new.is_stale()


def test_object_info(app: App) -> None:
    """``get_object_info`` has these keys and no others."""

    @app.share(managed=True)
    def load(size: int) -> torch.Tensor:
        return torch.ones(size)

    handle = load(256)
    info = handle.get_object_info()
    created, accessed = info.pop("created_at"), info.pop("last_accessed_at")
    # In the local role nobody else has it, and nothing is copied; else it is the reference to the one tensor.
    assert (info.pop("private_nbytes") == 0) == (app.role == "local")
    assert info == {
        "object_id": handle.object_id,
        "server_id": handle.server_id,
        "kind": "result",
        "endpoint": "load",
        "cache_key": "load(size=256)",
        "nbytes": 1024,
        "device": "cpu",
        "generation": 1,
        "current": True,
        "stale": False,
        "leases": 1,
        "active": 1,
        "tier": "device",
        "pinned": False,
        "copies": {},
    }
    assert 1.7e9 < created <= accessed


@pytest.mark.parametrize("attempt", [pickle.dumps, *deep(copy.copy, copy.deepcopy)])
def test_handle_stays_in_its_process(app: App, attempt: Callable[[Any], object]) -> None:
    """A handle is a lease of this process: it is neither pickled nor copied, and the error says what to do."""
    app.share("load", managed=True)(lambda: torch.ones(1))
    handle = app.provider.call("load")
    with pytest.raises(CapabilityError, match=f"handle of object {handle.object_id}.*call the endpoint"):
        attempt(handle)
    assert not handle.is_stale()


def test_repr_tells_the_state(app: App) -> None:
    """In a log a handle says which object it is of, and whether it was released."""
    app.share("load", managed=True)(lambda: torch.ones(1))
    handle = app.provider.call("load")
    assert repr(handle) == f"<Handle {handle.object_id} generation 1: Tensor>"
    handle.release()
    assert repr(handle) == f"<Handle {handle.object_id} generation 1: released>"
