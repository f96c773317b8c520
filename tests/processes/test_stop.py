"""The end of a server, on request or by SIGKILL, as seen by its waiting clients."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shared_rpc import Server
from shared_rpc.errors import ConnectionClosed, DeadlineExceeded
from shared_rpc.operations.server import await_exit
from shared_rpc.protocol import messages as m
from shared_rpc.provider.runtime import ServerRuntime
from tests.kit.processes import eventually
from tests.kit.raw import Raw, frame_of
from tests.kit.world import World

pytestmark = pytest.mark.usefixtures("no_leaks")

STOPPED = r"the server \(pid \d+\) was stopped before the call ended"


def stop(server: Server, seconds: float = 10.0) -> None:
    """Stop it, and check that this takes less than the given time."""
    begin = time.monotonic()
    server.stop()
    assert time.monotonic() - begin < seconds


# Those who wait.


def test_all_waiters_get_an_error(world: World, go: threading.Event) -> None:
    """Of runs, followers and queued calls: all end at once, with the reason."""
    server, client = world.serve(max_workers=2), world.client()
    world.share_held(go, cache=False)
    world.share("model")(lambda number: go.wait(30))
    with ThreadPoolExecutor(50) as pool:
        calls = [pool.submit(client.call, "held", number) for number in range(25)]
        calls += [pool.submit(client.call, "model", 1) for _ in range(25)]
        eventually(lambda: server.info()["calls"] == 50)
        stop(server)
        begin = time.monotonic()
        for call in calls:
            with pytest.raises(ConnectionClosed, match=STOPPED):
                call.result(timeout=5)
        assert time.monotonic() - begin < 10


def test_requests_during_the_stop_are_answered(world: World) -> None:
    """A thread of the server's process gets an answer or an error at any moment."""
    world.share("ones", cache=False)(lambda: torch.ones(1))
    for _ in range(20):
        server = world.serve()
        asked = threading.Semaphore(0)

        def ask(server: Server = server, asked: threading.Semaphore = asked) -> None:
            while True:
                server.engine.ask(lambda core: core.server_id)
                ServerRuntime(server).call("ones")
                asked.release()

        with ThreadPoolExecutor(3) as pool:
            threads = [pool.submit(ask) for _ in range(3)]
            for _ in range(10):
                asked.acquire()
            stop(server)
            for thread in threads:
                with pytest.raises(ConnectionClosed):
                    thread.result(timeout=5)


# Endpoints that do not end.


@pytest.mark.parametrize("kind", ["refuses to be cancelled", "blocks the loop"])
def test_stuck_endpoints_do_not_delay_the_stop(world: World, go: threading.Event, begun: threading.Event, kind: str) -> None:
    """For more than a second."""

    @world.share
    async def endless() -> None:
        begun.set()
        if kind == "blocks the loop":
            go.wait(30)
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(30)

    server = world.serve()
    with Raw(server.socket_path) as raw:
        raw.say(m.Call("endless"))
        begun.wait(10)
        stop(server)
        assert not os.path.lexists(server.socket_path)
        if kind != "blocks the loop":
            answer = raw.hear()
            assert isinstance(answer, m.Error)
            assert answer.code == "connection-closed"
    go.set()
    eventually(lambda: not server.running and not server.busy)


def test_endpoints_can_stop_their_server(world: World) -> None:
    """Without waiting for themselves."""
    server = world.serve()
    world.share("end")(server.stop)
    with pytest.raises(ConnectionClosed):
        world.client().call("end")
    eventually(lambda: not server.running and not server.busy)


def test_unread_replies_do_not_delay_the_stop(world: World) -> None:
    """Of a client that sends until the server stops reading."""
    server = world.serve()
    with Raw(server.socket_path) as raw:
        raw.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            while True:
                raw.sock.sendall(frame_of(m.GetObjectInfo("k" * 50_000)))
        stop(server)


# Processes.

SCRIPT = """
import threading
from shared_rpc import Provider, Server

provider = Provider(device="cpu")

@provider.share(cache=False)
def build():
    print("building")
    threading.Event().wait()

Server(provider).start(blocking=True)
print("stopped")
"""


def test_blocking_servers_stop_on_request(world: World) -> None:
    """By Ctrl-C, with exit code 0, during a build, without a socket or a traceback left."""
    server, client = world.process(SCRIPT), world.client(connect_timeout=20.0)
    client.ping()
    with Raw(client.socket_path) as raw:
        raw.say(m.Call("build"))
        server.expect("building")
        server.process.send_signal(signal.SIGINT)
        server.expect("stopped")
        answer = raw.hear()
    assert isinstance(answer, m.Error) and "was stopped before the call ended" in answer.text
    assert server.close() == (0, "")
    assert not os.path.lexists(client.socket_path)


def test_busy_servers_have_not_ended(tmp_path: Path) -> None:
    """One without a pid here, whose queue of connections is full, still runs."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(path)
        listener.listen(0)
        waiting.connect(path)
        with pytest.raises(DeadlineExceeded, match="did not exit"):
            await_exit(path, -1, 0.1)
    await_exit(path, -1, 5.0)
