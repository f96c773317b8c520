"""One connection that many threads share: who reads, who is woken, and what is left when they give up."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from anyio import current_time, move_on_after

from shared_rpc import AsyncClient, Client, Provider, Server
from shared_rpc.errors import DeadlineExceeded
from tests.kit.apps import Serve
from tests.kit.processes import eventually

pytestmark = pytest.mark.usefixtures("no_leaks")


# Clients.


@pytest.fixture
def server(provider: Provider, serve: Serve, go: threading.Event) -> Server:
    """A server with an endpoint that waits, and one whose objects have handles."""
    provider.share("wait", cache=False)(lambda: torch.full((1,), go.wait(30)))
    provider.share("own", cache=False, managed=True)(lambda: torch.ones(3))
    provider.share("twice", cache=False)(lambda x: x * 2)
    return serve()


def test_threads_that_time_out_and_go_on(server: Server, client: Client, go: threading.Event) -> None:
    """A storm of calls that end early beside calls that are answered: each thread has its own answers, and nothing is left."""

    def work(number: int) -> None:
        for turn in range(20):
            if (turn + number) % 4:
                assert client.call("twice", torch.tensor([number, turn])).tolist() == [2 * number, 2 * turn]
                client.call("own").release()
            else:
                with pytest.raises(DeadlineExceeded):
                    client.wait_for_task(task_id, 0.01)

    task_id = client.submit("wait")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    go.set()
    client.wait_for_task(task_id)
    eventually(lambda: server.info()["leases"] == 0)
    link = client._link
    assert link is not None and not link._exchanges.under_way and not link._waiting and link._reader is None
    assert server.info()["connections"] == 1


@pytest.mark.anyio
async def test_a_coroutine_that_is_cancelled_waits_for_nothing(server: Server, go: threading.Event) -> None:
    """A server that is stuck does not hold it up."""
    async with AsyncClient(socket_path=server.socket_path) as client:
        await client.ping()
        engine = server.engine
        engine.post(lambda: time.sleep(1.0))
        begin = current_time()
        with move_on_after(0.1):
            await client.ping()
        assert current_time() - begin < 0.6
