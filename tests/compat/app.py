"""The app: objects of the libraries, built, and the libraries imported, in the endpoints. ``python app.py`` serves it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from shared_rpc import Handle, Provider
from tests.compat.cases import build, cases_of
from tests.compat.modes import settle
from tests.kit.comparing import digest, strided_tensors

DEVICE = os.environ["COMPAT_DEVICE"]
#: Seconds that another process may take to start, or for what it is asked, on a machine that does much else.
PATIENCE = 200.0
provider = Provider(device=DEVICE, server_startup_timeout=PATIENCE)
settle(DEVICE)


class _Endpoints(NamedTuple):
    """The endpoints that return objects."""

    shared: Callable[[str, str], Handle[Any]]
    read_only: Callable[[str, str], Handle[Any]]


def _endpoints(tensors: Literal["all", "parameters"]) -> _Endpoints:
    @provider.share(f"shared_{tensors}", managed=True, tensors=tensors)
    def shared(library: str, name: str) -> Any:
        return build(library, name, DEVICE)

    @provider.share(f"read_only_{tensors}", managed=True, tensors=tensors, access="read")
    def read_only(library: str, name: str) -> Any:
        return build(library, name, DEVICE)

    return _Endpoints(shared, read_only)


_ALL, _PARAMETERS = _endpoints("all"), _endpoints("parameters")


def _of(library: str, name: str) -> _Endpoints:
    return _PARAMETERS if cases_of(library)[name].parameters_alone else _ALL


def shared(library: str, name: str) -> Handle[Any]:
    """An object of a library, as its users load it."""
    return _of(library, name).shared(library, name)


def read_only(library: str, name: str) -> Handle[Any]:
    """The same, for clients that only read."""
    return _of(library, name).read_only(library, name)


@provider.share(cache=False)
def digest_there(library: str, name: str) -> torch.Tensor:
    """The digest of :func:`shared` in the process that built it, as bytes."""
    with shared(library, name) as handle:
        return torch.tensor(list(digest(handle.value).encode()), dtype=torch.uint8, device=DEVICE)


@provider.share(cache=False)
def compute_there(library: str, name: str) -> Any:
    """What it computes in that process."""
    with shared(library, name) as handle, torch.no_grad():
        case = cases_of(library)[name]
        assert case.run is not None
        value = copy.deepcopy(handle.value) if case.remembers else handle.value
        # A pipeline may give host memory, whatever device it computes on.
        return [tensor.clone().to(DEVICE) for _, tensor in strided_tensors(case.run(value, DEVICE))]
