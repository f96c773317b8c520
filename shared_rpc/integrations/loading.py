"""Loading in a server, and attaching what it has loaded: the two halves of one request.

A request carries what is to be loaded, and how: a function, which runs in the server and returns a dict with a module in it.
The dict is rebuilt at each attach, so that each caller has a module of its own over the shared memory. The key by which the
server finds what it has comes with the request, and the server computes it again before it loads anything under it.
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

from shared_rpc.client.handle import Handle
from shared_rpc.errors import CapabilityError, ConfigurationError, EndpointNotFound
from shared_rpc.integrations.patching import ordinarily
from shared_rpc.operations.client import Client
from shared_rpc.provider.provider import ManagedDecorator, Provider

#: The name of the endpoint.
ENDPOINT = "from_pretrained"
#: Seconds after which a server drops what no process holds: as long as a server that was started by itself waits.
_IDLE = 3600.0
#: The attribute by which a storage holds the lease of its object, which so ends with the last tensor over it.
_HELD = "_shared_rpc_lease"


class LoadRequest(NamedTuple):
    """A request to a server: a key, the versions of libraries that are in it, and a function that loads, which is pickled."""

    key: str
    versions: dict[str, str]
    build: Loader


class Loader(Protocol):
    """Function that loads, with the key of what it loads."""

    def __call__(self) -> dict[str, Any]:
        """Load it."""

    def key(self, versions: dict[str, str]) -> str:
        """Return a text that is equal for equal results."""


def library(name: str) -> ModuleType:
    """Import a library that is no dependency of this package.

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


# The server's half.


def endpoint_of(provider: Provider) -> ManagedDecorator:
    """Return the decorator that makes a function the endpoint of a provider.

    A key has all that the result depends on. Parameters are shared and mapped for reading, and no other tensor is shared.
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
    """Have the server of a provider load for other processes, in addition to its own endpoints.

    To be called at the top level of the file that has the provider, so that a worker that is started again does it too.
    """
    if ENDPOINT not in provider.endpoints:
        endpoint_of(provider)(load)


def load(key: str, versions: dict[str, str], request: bytes) -> dict[str, Any]:
    """Load what a process requested, in the process that serves.

    :raises ConfigurationError: if a library has another version here than there, or the key is that of another request:
        others would get what they did not ask for.
    """
    here = versions_of(versions)
    if differing := [
        f"{name} {here[name]} here, {version} there" for name, version in versions.items() if here[name] != version
    ]:
        raise ConfigurationError(
            f"{key}: the server and the process that asks it differ in their libraries ({'; '.join(differing)}), and so in "
            f"what a model is: install the same ones, and restart the server (shared-rpc stop)"
        )
    build: Loader = pickle.loads(request)
    if (own := build.key(versions)) != key:
        raise ConfigurationError(f"the request asks for {own} by the key {key}: a request is asked for by its own key")
    with ordinarily():
        return build()


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed libraries by name, an empty text for one that is not there."""
    found = {}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


# The other half.


def attach(provider: Provider, request: LoadRequest) -> dict[str, Any]:
    """Return what a server has loaded, rebuilt around its memory: the caller's own, but for that memory.

    The lease lasts as long as any tensor over the memory.

    :raises ConfigurationError: if the server that listens does not load for others.
    """
    operations: Client | Provider = provider
    if provider.execution_mode == "server":
        # Its own calls would return the object that it serves, which is one for all.
        operations = Client(
            socket_path=provider.get_runtime_info()["socket_path"], device=provider.device, timeout=provider.timeout
        )
    try:
        handle: Handle[dict[str, Any]] = operations.call(ENDPOINT, request.key, request.versions, pickle.dumps(request.build))
    except EndpointNotFound as error:
        where = provider.get_runtime_info().get("socket_path")
        raise ConfigurationError(
            f"the server at {where} is that of another app, and loads nothing for others: set SHARED_TENSOR_BASE_PATH to a "
            f"path for shared_rpc.integrations.app, or have that app call shared_rpc.integrations.loading.serve_with(provider)"
        ) from error
    value = dict(handle.value)
    handle.value.clear()  # a handle that keeps the value would never go
    for module in value.values():
        if isinstance(module, nn.Module):
            for storage in _storages(module):
                storage.__dict__[_HELD] = handle
    return value


def release(module: nn.Module) -> None:
    """Give back the lease of an attached module before its tensors are gone. They stay valid."""
    leases = {id(lease): lease for storage in _storages(module) if (lease := storage.__dict__.pop(_HELD, None)) is not None}
    if not leases:
        raise CapabilityError(f"this {type(module).__name__} has no lease: it was not attached, or was released before")
    for lease in leases.values():
        lease.release()


def _storages(module: nn.Module) -> Iterator[torch.UntypedStorage]:
    from shared_rpc.codec.parameters import strided

    for parameter in module.parameters():
        for tensor in strided(parameter):
            yield tensor.untyped_storage()
