"""Which processes hold an object: of a broker, of a server in a process, and of a process that serves nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.errors import StaleHandleError
from tests.kit.apps import App
from tests.kit.brokers import BrokerApp
from tests.kit.processes import Child, eventually, python


@pytest.fixture(params=["broker", "in-process"])
def client(
    request: pytest.FixtureRequest,
    broker_app: BrokerApp,
    provider: Provider,
    serve: Callable[..., Server],
    connect: Callable[..., Client],
) -> Client:
    """A client of each kind of server, with a managed endpoint."""
    if request.param == "broker":
        broker_app.write()
        broker_app.start()
        return broker_app.connect()

    @provider.share(managed=True)
    def held(size: int = 4) -> torch.Tensor:
        return torch.full((size,), 7.0)

    serve()
    return connect()


@pytest.fixture
def holder(client: Client, children: list[Child]) -> Iterator[Child]:
    """Another process, which holds the object by two handles."""
    child = python(f"""
        from shared_rpc import Client
        client = Client(socket_path={client.socket_path!r})
        handles = [client.call("held"), client.call("held")]
        print("holds it", flush=True)
        input()
    """)
    children.append(child)
    child.expect("holds it")
    yield child


def test_a_process_holds_an_object_until_it_is_killed(client: Client, holder: Child) -> None:
    """It is told with its process id, its handles, and since when it is there; then another one is told alone."""
    handle = client.call("held")
    mine, other = sorted(client.holders(handle), key=lambda one: one["pid"] != os.getpid())
    assert (mine["pid"], mine["leases"], mine["connections"]) == (os.getpid(), 1, 1)
    assert (other["pid"], other["leases"], other["connections"]) == (holder.pid, 2, 1)
    sessions = {one["session"]: one["since"] for one in client.list_sessions()}
    assert all(one["since"] == sessions[one["session"]] <= time.time() for one in (mine, other))

    holder.kill()

    eventually(lambda: client.holders(handle.object_id) == [mine])


def test_what_is_not_there_has_no_holders(client: Client) -> None:
    """That is an error which says so, and not an empty list."""
    with pytest.raises(StaleHandleError, match="has no object 0123") as caught:
        client.holders("0123")
    assert caught.value.reason == "object_gone"


def test_a_task_holds_its_result_until_it_is_fetched(client: Client) -> None:
    """It is told by the task's id, and has no connection."""
    task = client.submit("held")
    (info,) = [client.watch_task(task)]
    (holder,) = client.holders(info.object_id or "")
    assert (holder["kind"], holder["session"], holder["connections"], holder["since"]) == ("task", task, 0, None)


@pytest.mark.asyncio
async def test_the_client_for_coroutines_asks_too(client: Client) -> None:
    """By the handle of either."""
    async with AsyncClient(socket_path=client.socket_path) as other, await other.call("held") as handle:
        assert [one["pid"] for one in await other.holders(handle)] == [os.getpid()]
        assert await other.holders(handle.object_id) == client.holders(handle.object_id)


def test_a_process_is_told_of_itself(app: App) -> None:
    """A provider asks whoever carries out its calls."""

    @app.share(managed=True)
    def load() -> torch.Tensor:
        return torch.zeros(3)

    handle = load()
    assert [(one["pid"], one["leases"]) for one in app.provider.holders(handle)] == [(os.getpid(), 1)]
