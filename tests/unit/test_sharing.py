"""``Provider.share``: the ways to decorate, the options, and what is left of the function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from shared_rpc import Provider
from shared_rpc.errors import EndpointNotFound


@pytest.mark.parametrize("name", ["load", "models.load"])
def test_ways_to_decorate(provider: Provider, name: str) -> None:
    """With or without parentheses, and with a name of its own."""

    def load() -> torch.Tensor:
        return torch.ones(1)

    decorate: Any = {
        "load": [provider.share, provider.share(), provider.share(managed=False)],
        "models.load": [provider.share("models.load"), provider.share(name="models.load")],
    }[name]
    assert {shared.name for shared in (way(load) for way in decorate)} == {name}
    assert list(provider.list_endpoints()) == [name]


def test_shared_function_looks_like_the_function(provider: Provider) -> None:
    """Name, docstring, module and signature are the function's own, for help() and for editors."""

    def load(size: int, *, bias: bool = True) -> torch.nn.Module:
        """Build a layer."""
        return torch.nn.Linear(size, size, bias=bias)

    shared = provider.share(managed=True)(load)
    assert (shared.__name__, shared.__doc__, shared.__module__) == ("load", "Build a layer.", __name__)
    assert inspect.signature(shared) == inspect.signature(load)
    assert shared.__wrapped__ is load
    assert repr(shared) == "<shared function load>"


def test_get_endpoint(provider: Provider) -> None:
    """The options of an endpoint, defaults included."""

    @provider.share(managed=True, idle_ttl=60)
    def load(size: int) -> torch.Tensor:
        """Build ones.

        Of any size.
        """
        return torch.ones(size)

    spec = provider.get_endpoint("load")
    parameters, fingerprint = spec.pop("parameters"), spec.pop("fingerprint")
    assert spec == {
        "name": "load",
        "execution": "direct",
        "concurrency": "parallel",
        "cache": True,
        "cache_format_key": None,
        "managed": True,
        "singleflight": True,
        "access": "read_write",
        "tensors": "all",
        "idle_ttl": 60,
        "is_async": False,
        "doc": "Build ones.",
        "host_copy": "on_evict",
        "pinned": False,
    }
    assert len(parameters) == 1
    assert len(bytes.fromhex(fingerprint)) == 16
    assert provider.list_endpoints() == {"load": spec | {"parameters": parameters, "fingerprint": fingerprint}}
    with pytest.raises(EndpointNotFound, match=r"'lod'.*did you mean 'load'"):
        provider.get_endpoint("lod")
