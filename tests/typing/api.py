"""The public types as a user sees them: checked by mypy, never run."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, assert_type

import torch

from shared_rpc import Client, Handle, Provider, Server, SharedFunction

provider = Provider("/tmp/app/s", enabled=True, execution_mode="client", device="cuda:0", timeout=None)


@provider.share
def bare(size: int, *, scale: float = 1.0) -> torch.Tensor:
    """Without parentheses."""
    return torch.ones(size) * scale


@provider.share("models.linear", cache_format_key="linear:{size}", access="read", idle_ttl=60.0)
def with_options(size: int) -> torch.nn.Linear:
    """With options."""
    return torch.nn.Linear(size, size)


@provider.share(managed=True, concurrency="serialized")
def managed(size: int) -> torch.nn.Linear:
    """A handle in every role."""
    return torch.nn.Linear(size, size)


@provider.share
async def asynchronous(size: int) -> torch.Tensor:
    """An awaitable in every role."""
    return torch.ones(size)


assert_type(bare(3, scale=2.0), torch.Tensor)
assert_type(with_options(3), torch.nn.Linear)
assert_type(managed(3), Handle[torch.nn.Linear])
assert_type(managed(3).value, torch.nn.Linear)
awaitable = asynchronous(3)
assert_type(awaitable, Coroutine[Any, Any, torch.Tensor])
assert_type(bare.invalidate(3), int)
assert_type(bare.name, str)

bare("3")  # type: ignore[arg-type]
bare(3, 2.0)  # type: ignore[call-arg]
bare.invalidate(size="3")  # type: ignore[arg-type]
managed()  # type: ignore[call-arg]
provider.share(manged=True)  # type: ignore[call-overload]
provider.share(access="write")  # type: ignore[call-overload]
Provider(execution_mode="servr")  # type: ignore[arg-type]


def uses(function: SharedFunction[[int], torch.Tensor]) -> None:
    """What blocks and clients give."""
    with managed(3) as handle:
        assert_type(handle, Handle[torch.nn.Linear])
        assert_type(handle.get_object_info(refresh=True), dict[str, Any])
        assert_type(handle.is_stale(), bool)
    with Client(device="cpu") as client:
        assert_type(client, Client)
        assert_type(client.ping(), float)
        assert_type(client.release_many([handle, "id"]), int)
        client.ensure_handle_live(handle)
    with Server(provider, max_bytes=1 << 30) as server:
        assert_type(server, Server)
        assert_type(server.socket_path, str)
    assert_type(function(3), torch.Tensor)
