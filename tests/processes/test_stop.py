"""The end of a server, on request or by SIGKILL, as seen by its waiting clients."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from shared_rpc import Provider, Server
from shared_rpc.errors import ConnectionClosed
from shared_rpc.protocol import messages as m
from shared_rpc.provider.runtime import ServerRuntime
from tests.kit.apps import Connect, Serve
from tests.kit.processes import Child, eventually
from tests.kit.raw import Raw, frame_of

pytestmark = pytest.mark.usefixtures("no_leaks")

STOPPED = r"the server \(pid \d+\) was stopped before the call ended"


@pytest.fixture
def hold(provider: Provider, go: threading.Event, begun: threading.Event) -> Callable[[int], torch.Tensor]:
    """An endpoint that does not end before the test."""

    @provider.share(cache=False)
    def hold(number: int) -> torch.Tensor:
        begun.set()
        go.wait(30)
        return torch.ones(number)

    return hold


def stop(server: Server, seconds: float = 10.0) -> None:
    """Stop it, and check that this takes less than the given time."""
    begin = time.monotonic()
    server.stop()
    assert time.monotonic() - begin < seconds


# Those who wait.


def test_all_waiters_get_an_error(
    provider: Provider, hold: Callable[[int], torch.Tensor], serve: Serve, connect: Connect
) -> None:
    """Of runs, followers and queued calls: all end at once, with the reason."""
    server, client = serve(max_workers=2), connect()
    provider.share("model")(hold._endpoint.function)
    with ThreadPoolExecutor(50) as pool:
        calls = [pool.submit(client.call, "hold", number) for number in range(25)]
        calls += [pool.submit(client.call, "model", 1) for _ in range(25)]
        eventually(lambda: server.info()["calls"] == 50)
        stop(server)
        begin = time.monotonic()
        for call in calls:
            with pytest.raises(ConnectionClosed, match=STOPPED):
                call.result(timeout=5)
        assert time.monotonic() - begin < 10


def test_requests_during_the_stop_are_answered(provider: Provider, serve: Serve) -> None:
    """A thread of the server's process gets an answer or an error at any moment."""
    provider.share("ones", cache=False)(lambda: torch.ones(1))
    for _ in range(20):
        server = serve()
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


def test_unread_replies_do_not_delay_the_stop(provider: Provider, serve: Serve) -> None:
    """Replies that are never read do not hold up the end."""
    server = serve()
    with Raw(server.socket_path) as raw:
        raw.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            while True:
                raw.sock.sendall(frame_of(m.GetObjectInfo("k" * 50_000)))
        stop(server)


# Endpoints that do not end.


@pytest.mark.parametrize("kind", ["refuses to be cancelled", "blocks the loop"])
def test_stuck_endpoints_do_not_delay_the_stop(
    provider: Provider, serve: Serve, go: threading.Event, begun: threading.Event, kind: str
) -> None:
    """For more than a second."""

    @provider.share
    async def endless() -> None:
        begun.set()
        if kind == "blocks the loop":
            go.wait(30)
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(30)

    server = serve()
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


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_endpoints_can_stop_their_server(provider: Provider, serve: Serve, connect: Connect, is_async: bool) -> None:
    """Without waiting for themselves. One on the loop ends before the server does, and may be answered."""

    def end() -> None:
        server.stop()

    async def end_async() -> None:
        server.stop()

    provider.share("end")(end_async if is_async else end)
    server = serve()
    with suppress(ConnectionClosed) if is_async else pytest.raises(ConnectionClosed):
        connect().call("end")
    eventually(lambda: not server.running and not server.busy)


# Processes.

SCRIPT = """
import asyncio, sys, threading
from shared_rpc import Provider, Server

provider = Provider(device="cpu")

@provider.share(cache=False)
def build():
    print("building")
    threading.Event().wait()

@provider.share(cache=False)
async def build_async():
    print("building")
    await asyncio.sleep(1000)

if "blocking" in sys.argv:
    Server(provider).start(blocking=True)
    print("stopped")
"""


@pytest.mark.parametrize(
    ("number", "busy", "arguments"),
    [
        (signal.SIGTERM, "build_async", []),
        (signal.SIGINT, "build", ["blocking"]),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_server_processes_stop_on_request(
    connect: Connect, children: list[Child], number: signal.Signals, busy: str, arguments: list[str]
) -> None:
    """With exit code 0 in less than a second, during a build, without a socket or a traceback left."""
    child = Child("-c", SCRIPT, *arguments, environ={"SHARED_TENSOR_ROLE": "server"})
    children.append(child)
    client = connect(connect_timeout=20.0)
    client.ping()
    path = client.socket_path
    with Raw(path) as raw:
        raw.say(m.Call(busy))
        child.expect("building")
        child.process.send_signal(number)
        begin = time.monotonic()
        child.process.wait(10)
        took = time.monotonic() - begin
        answer = raw.hear()
        assert isinstance(answer, m.Error)
        assert f"the server (pid {child.pid}) was stopped before the call ended" in answer.text
    code, errors = child.close()
    assert (code, "Traceback" in errors, os.path.lexists(path)) == (0, False, False)
    assert took < 10  # the second that stop() may take, and the interpreter's own end on a busy machine
