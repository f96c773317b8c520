"""``Provider.share``: the ways to decorate, the options, and what is left of the function."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from shared_rpc import Provider
from shared_rpc.errors import ConfigurationError, EndpointNotFound


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


def test_unknown_option(provider: Provider) -> None:
    """A misspelt option is a TypeError that names it, at decoration."""
    options: dict[str, Any] = {"manged": True}
    with pytest.raises(TypeError, match="unexpected option 'manged'"):
        provider.share("load", **options)(lambda: None)


@pytest.mark.parametrize("option", ["is_async", "parameters", "doc"])
def test_what_the_function_itself_says_is_no_option(provider: Provider, option: str) -> None:
    """What is read off the function cannot be given beside it."""
    options: dict[str, Any] = {option: True}
    with pytest.raises(TypeError, match=option):
        provider.share("load", **options)(lambda: None)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"concurrency": "serial"}, "concurrency='serial'; use 'parallel' or 'serialized'"),
        ({"execution": "later"}, "execution='later'; use 'direct' or 'task'"),
        ({"access": "write"}, "access='write'; use 'read_write' or 'read'"),
        ({"managed": "yes"}, "managed='yes'; use True or False"),
        ({"idle_ttl": -1}, "idle_ttl=-1; use seconds"),
        ({"cache_format_key": "{sise}"}, "names 'sise', which is none of its arguments (size)"),
        ({"cache_format_key": "{}"}, "has a field without a name"),
        ({"cache_format_key": "{size"}, "is not a format string"),
        ({"name": "no spaces"}, "'no spaces' cannot name an endpoint"),
    ],
    ids=str,
)
def test_option_that_cannot_be_used(provider: Provider, options: dict[str, Any], text: str) -> None:
    """A wrong value fails at decoration, naming the endpoint, the option and what is allowed."""
    options = {"name": "load", **options}
    with pytest.raises(ConfigurationError) as caught:
        provider.share(**options)(lambda size: None)
    assert text in str(caught.value)
    assert options["name"] in str(caught.value)


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


def test_sharing_a_name_again_replaces_it(provider: Provider) -> None:
    """As for a function that is defined twice, the last one counts."""
    provider.share("load")(lambda: torch.zeros(1))
    load = provider.share("load")(lambda: torch.ones(1))
    assert torch.equal(load(), torch.ones(1))
    assert list(provider.list_endpoints()) == ["load"]
