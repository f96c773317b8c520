"""Resources of a client process, all of which are returned however the process ends."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared_rpc import Client, Provider, Server
from shared_rpc.errors import ConnectionClosed, DeadlineExceeded, StaleHandleError
from tests.kit.apps import Connect, Serve
from tests.kit.processes import Program, eventually

pytestmark = pytest.mark.usefixtures("no_leaks")

#: A client process without torch: hold() takes a lease on an object that it does not map.
HOLDER = """
import os, signal, sys
from shared_rpc import Client
from shared_rpc.protocol import messages as m

client = Client(device="cpu")

def hold(endpoint="kept"):
    reply, _ = client._run(client._sent(m.Call, endpoint, (3,), {}, endpoint))
    reply.frame.close()
"""


@pytest.fixture
def server(provider: Provider, serve: Serve, go: threading.Event, begun: threading.Event) -> Server:
    """A server in this process."""
    provider.share("kept", managed=True)(lambda size: torch.ones((size,)))
    provider.share("own", managed=True, cache=False)(lambda size: torch.ones((size,)))

    @provider.share(managed=True)
    def slow(size: int) -> torch.Tensor:
        begun.set()
        go.wait(30)
        return torch.ones(size)

    return serve()


def leases(server: Server) -> int:
    """Return the number of leases in the server."""
    return int(server.info()["leases"])


def holders(client: Client) -> list[int]:
    """Return the pids of all holders."""
    return sorted(holder["pid"] for stored in client.list_objects() for holder in stored["holders"])


def test_closing_the_client_releases_all_leases(server: Server, client: Client) -> None:
    """At once; tensors stay valid; later operations give the reason."""
    handles = [client.call("own", size) for size in (1, 2, 3)]
    tensors = [handle.value for handle in handles]
    client.close()
    eventually(lambda: leases(server) == 0, seconds=1)
    assert [int(tensor.sum()) for tensor in tensors] == [1, 2, 3]
    for handle in handles:
        handle.release()
    with pytest.raises(ConnectionClosed, match="this client is closed"):
        client.ping()
    client.close()


def test_killed_processes_release_their_leases(server: Server, program: Program) -> None:
    """Within a second."""
    child = program(f"{HOLDER}\nhold()\nprint('held')\nsys.stdin.readline()")
    child.expect("held")
    assert leases(server) == 1
    child.kill()
    eventually(lambda: leases(server) == server.info()["sessions"] == 0, seconds=1)


# Threads.


def test_closing_a_client_that_many_threads_use(server: Server, connect: Connect) -> None:
    """Whenever it happens, every thread ends with an error that names the client, and nothing stays open."""
    for _ in range(5):
        client = connect(connect_timeout=10.0)
        started = threading.Semaphore(0)

        def use(client: Client = client, started: threading.Semaphore = started) -> None:
            while True:
                client.call("own", 3).release()
                started.release()

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(use) for _ in range(4)]
            for _ in range(8):
                started.acquire()
            client.close()
            for future in futures:
                with pytest.raises(ConnectionClosed, match=r"this client (is|was) closed"):
                    future.result(timeout=5)
        eventually(lambda: server.info()["connections"] == 0)
        eventually(lambda: server.info()["objects"] == 0)


# Calls that end early.


def test_threads_with_timeouts_get_their_own_answers(server: Server, client: Client, go: threading.Event) -> None:
    """A storm of calls that time out next to others: nothing is mixed up, and nothing is left."""

    def work(number: int) -> None:
        for turn in range(20):
            if (turn + number) % 4:
                with client.call("own", number + 1) as handle:
                    assert handle.value.shape == (number + 1,)
            else:
                with pytest.raises(DeadlineExceeded):
                    client.wait_for_task(task_id, 0.01)

    task_id = client.submit("slow", 1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    go.set()
    client.wait_for_task(task_id).release()
    eventually(lambda: server.info()["leases"] == 0)
    link = client._link
    assert link is not None and not link._exchanges.pending and not link._waiting and link._reader is None
    assert server.info()["connections"] == 1


def test_a_timeout_keeps_the_session(
    server: Server, client: Client, go: threading.Event, begun: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is abandoned, its run continues; the session, its other leases and the connection stay."""
    held = client.call("own", 3)
    with monkeypatch.context() as patch:
        patch.setattr(client, "_timeout", 0.2)
        with pytest.raises(DeadlineExceeded, match=r"slow\(\) took longer than its timeout") as caught:
            client.call("slow", 3)
    assert isinstance(caught.value, TimeoutError)  # users of Python's own exceptions need not know ours
    assert begun.wait(10)
    assert not held.is_stale()
    assert (server.info()["sessions"], server.info()["connections"]) == (1, 1)
    go.set()
    assert client.call("slow", 3).value.sum() == 3
    assert server.info()["builds"] == 2


# Forks.


def test_forked_children_have_their_own_sessions(server: Server, client: Client, program: Program) -> None:
    """And leases; they do not keep those of their parent, which end when it is killed."""
    parent = program(
        HOLDER
        + """
hold()
if os.fork() == 0:
    hold()
    print("child holds", os.getpid())
    sys.stdin.readline()
    os._exit(0)
signal.pause()
"""
    )
    child = int(parent.expect("child holds").split()[-1])
    assert holders(client) == sorted([parent.pid, child])
    os.kill(parent.pid, signal.SIGKILL)
    eventually(lambda: holders(client) == [child], seconds=1)
    parent.tell("end, child")
    eventually(lambda: holders(client) == [], seconds=1)


# Another server.


def test_a_restarted_server_is_found(server: Server, client: Client) -> None:
    """Handles of the earlier one report it, and their tensors stay valid."""
    handle = client.call("kept", 3)
    server.stop()
    server.start()
    assert client.get_server_info()["server_id"] != handle.server_id
    with pytest.raises(StaleHandleError, match=f"issued by server {handle.server_id}.*call the endpoint again") as caught:
        client.ensure_handle_live(handle)
    assert caught.value.reason == "server_changed"
    assert handle.is_stale()
    assert handle.value.sum() == 3
    with client.call("kept", 3) as again:
        handle.release()
        assert not again.is_stale() and leases(server) == 1
