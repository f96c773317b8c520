"""Clients of a stopped server, as under a debugger: the limits of their waits, and their later calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from shared_rpc import AsyncClient, Client
from shared_rpc.client.exchange import PROMPT
from shared_rpc.errors import DeadlineExceeded
from tests.kit.processes import Child, eventually, python, sigstop

pytestmark = pytest.mark.usefixtures("no_leaks")

SERVER = """
import sys, torch
from shared_rpc import Provider, Server
provider = Provider(device="cpu")
provider.share("held", managed=True)(lambda: torch.ones(3))
with Server(provider):
    print("serving", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start(no_leaks: None, tmp_path: Path, children: list[Child]) -> Callable[[str], Child]:
    """``start(name)`` starts a server of another process, with ``tmp_path / name`` as its base path."""
    tmp_path.chmod(0o700)

    def start(name: str) -> Child:
        children.append(python(SERVER, environ={"SHARED_TENSOR_BASE_PATH": str(tmp_path / name)}))
        children[-1].expect("serving")
        return children[-1]

    return start


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """``connect(name)`` makes a client of that server, which is closed at the end."""
    made: list[Client] = []

    def connect(name: str, **options: Any) -> Client:
        made.append(Client(tmp_path / name, **{"device": "cpu", **options}))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def leases(client: Client) -> int:
    """Return the leases on objects of a server."""
    return client.get_server_info()["leases"]


def test_dropped_handles_delay_no_other(start: Callable[[str], Child], connect: Callable[..., Client]) -> None:
    """A lease of another server ends at once, and that of the stopped one when it continues."""
    server = start("stopped")
    start("other")
    stopped, other = connect("stopped"), connect("other")
    first, second, third = stopped.call("held"), stopped.call("held"), other.call("held")
    sigstop(server.pid)
    del first, second, third
    eventually(lambda: leases(other) == 0, seconds=60)
    os.kill(server.pid, signal.SIGCONT)
    eventually(lambda: leases(stopped) == 0, seconds=60)


@pytest.mark.parametrize("operation", [Client.ping, lambda client: client.on_refresh(print)], ids=["ping", "subscription"])
def test_client_timeouts_hold(
    start: Callable[[str], Child], connect: Callable[..., Client], operation: Callable[[Client], object]
) -> None:
    """An operation ends soon after its timeout, although the server does not confirm the cancellation."""
    server = start("stopped")
    client = connect("stopped", timeout=0.5)
    client.ping()
    sigstop(server.pid)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        operation(client)
    assert time.monotonic() - begin < PROMPT
    os.kill(server.pid, signal.SIGCONT)


def test_releases_of_coroutines_end(start: Callable[[str], Child], connect: Callable[..., Client], tmp_path: Path) -> None:
    """After the client's timeout, or soon at the end of a block; the server processes them when it continues."""
    server, watcher = start("stopped"), connect("stopped")

    async def main() -> None:
        client, other = (AsyncClient(tmp_path / "stopped", device="cpu", timeout=timeout) for timeout in (0.5, None))
        async with client, other:
            handle = await client.call("held")
            async with await other.call("held"):
                sigstop(server.pid)
            await handle.release()
            os.kill(server.pid, signal.SIGCONT)
            await anyio.to_thread.run_sync(lambda: eventually(lambda: leases(watcher) == 0, seconds=60))

    anyio.run(main)


def test_handles_are_not_stale(start: Callable[[str], Child], connect: Callable[..., Client]) -> None:
    """The server's state is unknown, which is an error."""
    server = start("stopped")
    handle = connect("stopped", timeout=0.5).call("held")
    sigstop(server.pid)
    with pytest.raises(DeadlineExceeded):
        handle.is_stale()
    os.kill(server.pid, signal.SIGCONT)
    assert not handle.is_stale()
