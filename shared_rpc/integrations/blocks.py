"""The ``with`` blocks in which libraries attach instead of loading, with the same rules for all libraries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from shared_rpc.errors import CapabilityError
from shared_rpc.integrations.keys import CheckpointChanged, Unshareable
from shared_rpc.integrations.loading import LoadRequest, attach
from shared_rpc.integrations.patching import Loader, ordinarily, replaced
from shared_rpc.provider.provider import Provider

#: Maximum number of attempts if files change between a request and its answer.
_ATTEMPTS = 3


class Plan(NamedTuple):
    """A request that replaces a call, and the function that converts the reply to the call's result."""

    request: LoadRequest
    finish: Callable[[dict[str, Any]], Any]


class Library(NamedTuple):
    """The class of a library whose ``from_pretrained`` loads, and the planner of its calls.

    ``plan(cls, args, kwargs, device)`` may change ``kwargs``, and raises :class:`Unshareable` if the call cannot be replaced.
    """

    owner: Callable[[], type]
    plan: Callable[[Any, tuple[Any, ...], dict[str, Any], str], Plan]


def block(provider: Provider | None, fallback: bool, libraries: Sequence[Library]) -> AbstractContextManager[None]:
    """Return a block in which the libraries attach instead of loading. It has no effect in the local role.

    :param fallback: True to load unshareable models ordinarily, with a warning.
    """
    if provider is None:
        from shared_rpc.integrations.app import provider as shipped

        provider = shipped
    owners = {library.owner(): library for library in libraries}
    if provider.execution_mode == "local":
        return ordinarily()
    return replaced({owner: _loader(provider, fallback, library) for owner, library in owners.items()})


def _loader(provider: Provider, fallback: bool, library: Library) -> Loader:
    def load(cls: type, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ordinarily():
            try:
                return _attached(provider, library, cls, args, kwargs)
            except (Unshareable, CapabilityError) as error:
                name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
                problem = f"{cls.__name__}.from_pretrained({name!r}) is not shared: {error}"
                if not fallback:
                    raise CapabilityError(problem) from error
            warnings.warn(f"{problem}. It is loaded for this process alone", stacklevel=3)
            return original(*args, **kwargs)

    return load


def _attached(provider: Provider, library: Library, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for attempt in range(_ATTEMPTS):
        plan = library.plan(cls, args, dict(kwargs), provider.device_id)
        try:
            return plan.finish(attach(provider, plan.request))
        except CheckpointChanged:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")
