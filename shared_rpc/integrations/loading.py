"""Load requests: the server loads, and the client attaches the result.

A request carries a function, which runs in the server and returns a dict with a module in it. The dict is rebuilt at each
attach, so that each caller has its own module over the shared memory. The request also has the key of the result, which the
server computes again before it loads anything under it.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable, Iterator
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from shared_rpc.errors import CapabilityError, ConfigurationError, EndpointNotFound
from shared_rpc.integrations.patching import ordinarily
from shared_rpc.operations.client import Client
from shared_rpc.operations.handles import Handle
from shared_rpc.provider.provider import ManagedDecorator, Provider

#: The name of the endpoint.
ENDPOINT = "from_pretrained"
#: Idle seconds after which a server drops an unheld object: the idle exit of a server that was started automatically.
_IDLE = 3600.0
#: The attribute of a storage that holds the lease of its object, so that the lease ends with the last tensor over it.
_HELD = "_shared_rpc_lease"


class LoadRequest(NamedTuple):
    """A request to a server: a key, the library versions in it, and the function that loads."""

    key: str
    versions: dict[str, str]
    build: Loader


class Loader(Protocol):
    """A function that loads an object, with the key of its result."""

    def __call__(self) -> dict[str, Any]:
        """Load the object."""

    def key(self, versions: dict[str, str]) -> str:
        """Return the key, a text that is equal for equal results."""


def library(name: str) -> ModuleType:
    """Import a library that is not a dependency of this package.

    :raises ConfigurationError: if it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        distribution = name.replace("_", "-")
        raise ConfigurationError(
            f"shared_rpc.integrations.{name} needs {distribution}, which is not installed: pip install {distribution}"
        ) from error


# In the server.


def endpoint_of(provider: Provider) -> ManagedDecorator:
    """Return the decorator that makes a function the load endpoint of a provider.

    The key covers everything that the result depends on. Parameters are shared and mapped read-only; other tensors are not.
    """
    return provider.share(
        ENDPOINT,
        managed=True,
        access="read",
        tensors="parameters",
        execution="task",
        cache_format_key="{key}",
        idle_ttl=_IDLE,
    )


def serve_with(provider: Provider) -> None:
    """Add the load endpoint to a provider, so that its server also loads for other processes.

    Call it at the top level of the provider's file, so that it also applies to restarted workers.
    """
    if ENDPOINT not in provider.endpoints:
        endpoint_of(provider)(load)


def load(key: str, versions: dict[str, str], request: bytes) -> dict[str, Any]:
    """Execute a load request in the server.

    :raises ConfigurationError: if a library has another version in the client, or the key does not match the request, because
        other clients would get a wrong result.
    """
    here = versions_of(versions)
    if differing := [
        f"{name} {here[name]} here, {version} there" for name, version in versions.items() if here[name] != version
    ]:
        raise ConfigurationError(
            f"{key}: server and client have different library versions ({'; '.join(differing)}), which would build different "
            f"models: install the same ones, and restart the server (shared-rpc stop)"
        )
    build: Loader = pickle.loads(request)
    if (own := build.key(versions)) != key:
        raise ConfigurationError(f"the key of a request does not match it: sent {key}, computed {own}")
    with ordinarily():
        return build()


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """Return library versions by name, an empty text for libraries that are not installed."""
    found = {}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


# In the client.


def attach(provider: Provider, request: LoadRequest) -> dict[str, Any]:
    """Have the server load a request, and return the caller's own object over the server's memory.

    The lease lasts as long as any tensor over the memory.

    :raises ConfigurationError: if the server has no load endpoint.
    """
    operations: Client | Provider = provider
    if provider.execution_mode == "server":
        # The provider's own calls would return the object that it serves, which is one for all.
        operations = Client(
            socket_path=provider.get_runtime_info()["socket_path"], device=provider.device, timeout=provider.timeout
        )
    try:
        handle: Handle[dict[str, Any]] = operations.call(ENDPOINT, request.key, request.versions, pickle.dumps(request.build))
    except EndpointNotFound as error:
        where = provider.get_runtime_info().get("socket_path")
        raise ConfigurationError(
            f"the server at {where} belongs to another app, and does not load models for others: "
            f"set SHARED_TENSOR_BASE_PATH to a path for shared_rpc.integrations.app, or let that app call "
            f"shared_rpc.integrations.loading.serve_with(provider)"
        ) from error
    value = dict(handle.value)
    handle.value.clear()  # a handle that keeps the value would never be collected
    for module in value.values():
        if isinstance(module, nn.Module):
            for storage in _storages(module):
                storage.__dict__[_HELD] = handle
    return value


def release(module: nn.Module) -> None:
    """Release the lease of an attached module. Its tensors stay valid."""
    leases = {id(lease): lease for storage in _storages(module) if (lease := storage.__dict__.pop(_HELD, None)) is not None}
    if not leases:
        raise CapabilityError(f"this {type(module).__name__} has no lease: it was not attached, or was released before")
    for lease in leases.values():
        lease.release()


def _storages(module: nn.Module) -> Iterator[torch.UntypedStorage]:
    from shared_rpc.codec.blocks import strided

    for parameter in module.parameters():
        for tensor in strided(parameter):
            yield tensor.untyped_storage()
