"""Sources of records are killed with pending misses of their server: callers still get their objects."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared_rpc import Source
from shared_rpc.errors import ClusterError, ConnectionClosed
from tests.kit.brokers import BrokerApp, begun
from tests.kit.joiners import KNOWN_TOKEN, source_of
from tests.kit.processes import Child, eventually
from tests.kit.world import World

pytestmark = pytest.mark.usefixtures("admitted_source")

#: A source that answers or ignores each miss.
SOURCE = """
import sys
from shared_rpc import Client

with Client(sys.argv[1], device="cpu") as client, client.source() as source:
    print("attached", flush=True)
    for miss in source:
        print("miss", miss.cache_key, flush=True)
        order = input()
        if order == "build":
            source.build(miss).release()
        print("done", flush=True)
"""

SLOW = """
    @provider.share(managed=True)
    def waits(path):
        wait(path)
        return torch.ones(1)
"""


@pytest.fixture
def app(broker_app: BrokerApp) -> BrokerApp:
    """An app, not served yet."""
    broker_app.write(SLOW)
    return broker_app


Start = Callable[[], Child]


@pytest.fixture
def start_source(app: BrokerApp, world: World) -> Start:
    """``start_source()`` starts a source in another process."""

    def start() -> Child:
        child = world.process(SOURCE, app.base_path)
        child.expect("attached")
        return child

    return start


def test_misses_of_a_killed_source_go_to_the_next(app: BrokerApp, start_source: Start, threads: ThreadPoolExecutor) -> None:
    """Including those that it had received; each is built once."""
    app.start_program(app.program(KNOWN_TOKEN, source_grace=600))
    client, first = app.connect(), start_source()
    calls = [threads.submit(app.connect().call, "held", size) for size in (1, 2, 3)]
    first.expect("miss held")
    eventually(lambda: source_of(client)["misses"] == 3)
    first.kill()
    eventually(lambda: source_of(client)["session"] is None)
    assert [run["status"] for run in client.list_runs()] == ["asked"] * 3
    second = start_source()
    for _ in calls:
        second.expect("miss held")
        second.tell("build")
        second.expect("done")
    for call in calls:
        call.result(20).release()
    assert client.get_statistics()["held"]["builds"] == 3


def test_builds_continue_after_the_source_is_killed(
    app: BrokerApp, start_source: Start, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Callers get the object; the killed process holds nothing."""
    app.start_program(app.program(KNOWN_TOKEN, source_grace=600))
    client, source = app.connect(), start_source()
    path = tmp_path / "go"
    call = threads.submit(app.connect().call, "waits", str(path))
    source.expect("miss waits")
    source.tell("build")
    eventually(begun(path))
    assert [run["status"] for run in client.list_runs()] == ["running"]
    source.kill()
    eventually(lambda: source_of(client)["session"] is None)
    path.touch()
    call.result(20).release()
    eventually(lambda: client.get_server_info()["leases"] == 0)


def test_a_crashed_build_of_a_miss_is_reported(app: BrokerApp, threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Source and callers get the error; the next call is a miss again."""
    app.start_program(app.program(KNOWN_TOKEN, source_grace=600))
    client, path = app.connect(), tmp_path / "go"
    with app.connect().source() as source:
        call = threads.submit(client.call, "waits", str(path))
        build = threads.submit(source.build, next(source))
        eventually(begun(path))
        (pid,) = [worker["pid"] for worker in app.connect().get_server_info()["workers"]]
        os.kill(pid, signal.SIGKILL)
        for failed in (call, build):
            assert type(failed.exception(20)).__name__ == "WorkerCrashed"
        path.touch()
        call = threads.submit(client.call, "waits", str(path))
        source.build(next(source)).release()
        call.result(20).release()


def test_a_killed_broker_ends_its_source(app: BrokerApp, threads: ThreadPoolExecutor) -> None:
    """It does not attach itself to the next broker, which lacks its misses."""
    broker = app.start_program(app.program(KNOWN_TOKEN, source_grace=600))
    source: Source = app.connect(connect_timeout=20.0).source().__enter__()
    waiting = threads.submit(next, source)
    eventually(lambda: source_of(app.connect())["session"] is not None)
    broker.kill()
    app.start_program(app.program(KNOWN_TOKEN, source_grace=600))
    assert isinstance(waiting.exception(20), (ConnectionClosed, ClusterError))
    app.connect().call("held", 1).release()
