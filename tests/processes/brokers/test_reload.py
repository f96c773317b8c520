"""A reload without downtime: new workers take over once they are ready, and unchanged objects stay."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, errors
from shared_rpc.broker.broker import Broker
from shared_rpc.broker.worker import WorkerCommand
from shared_rpc.protocol.options import ServeOptions
from tests.kit.brokers import BrokerApp, begun, is_running, worker_pids
from tests.kit.processes import eventually
from tests.kit.world import World

OLD = """
@provider.share
def answer():
    return torch.full((2,), 1.0)
"""
NEW = OLD.replace("1.0", "2.0")


@pytest.fixture
def app(broker_app: BrokerApp) -> BrokerApp:
    """An app, not served yet."""
    broker_app.write(OLD)
    return broker_app


def test_results_of_changed_endpoints_are_rebuilt(app: BrokerApp) -> None:
    """Objects of other endpoints stay; holders keep the memory of an old one."""
    client = app.serve()
    model, old, earlier = client.call("model"), client.call("answer"), worker_pids(client)
    app.write(NEW)
    facts = client.reload()
    (service,) = facts["services"].values()
    assert (service["changed"], service["dropped"]) == (["answer"], 1)
    assert facts["workers"] == worker_pids(client) != earlier
    assert (old.tolist(), client.call("answer").tolist()) == ([1, 1], [2, 2])
    assert client.call("model") is model
    eventually(lambda: not is_running(earlier[0]), what="the old worker ends")


def test_code_that_does_not_load_changes_nothing(app: BrokerApp) -> None:
    """The old workers stay, the error gives the reason, and the next attempt succeeds."""
    client = app.serve()
    earlier = worker_pids(client)
    app.write("raise LookupError('no such checkpoint')")
    with pytest.raises(errors.WorkerCrashed, match="no such checkpoint"):
        client.reload()
    assert worker_pids(client) == earlier
    assert client.call("answer").tolist() == [1, 1]
    app.write(NEW)
    client.reload()
    assert client.call("answer").tolist() == [2, 2]


def test_calls_succeed_during_a_reload(app: BrokerApp) -> None:
    """Continuous attaches, builds and echoes: none fails, in old or new workers."""
    app.start()
    stop, failures = threading.Event(), []

    def work(number: int) -> None:
        with Client(app.base_path, device="cpu", timeout=20) as client:
            count = 0
            while not stop.is_set():
                try:
                    client.call("model", 4)
                    client.call("model", 100 * number + count % 50)
                    assert client.call("echo", torch.full((300,), float(count)))[0] == count
                except Exception as error:
                    failures.append(error)
                count += 1

    working = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in working:
        thread.start()
    client = app.connect()
    for code in (NEW, OLD):
        app.write(code)
        client.reload()
    stop.set()
    for thread in working:
        thread.join()
    assert failures == []


def test_old_workers_finish_their_runs(app: BrokerApp, threads: concurrent.futures.ThreadPoolExecutor, tmp_path: Path) -> None:
    """A run of old code completes, and its worker ends afterwards; results of changed code are not cached."""
    source = """
        @provider.share
        def slowly(path):
            wait(path)
            return torch.full((1,), {value})
    """
    client = app.serve(source.format(value=1.0))
    earlier = worker_pids(client)[0]
    running = threads.submit(client.call, "slowly", str(tmp_path / "go"))
    eventually(begun(tmp_path / "go"))
    app.write(source.format(value=2.0))
    client.reload()
    assert is_running(earlier)
    (tmp_path / "go").touch()
    assert running.result(20) == 1
    eventually(lambda: not is_running(earlier), what="the old worker ends")
    assert client.call("slowly", str(tmp_path / "go")) == 2


def test_removed_endpoints_are_unavailable(app: BrokerApp) -> None:
    """They cannot be called, and their objects are dropped; new ones can be called."""
    client = app.serve()
    client.call("answer")
    app.write(OLD.replace("answer", "reply"))
    client.reload()
    with pytest.raises(errors.EndpointNotFound, match="answer"):
        client.call("answer")
    assert client.call("reply").tolist() == [1, 1]
    assert [info["endpoint"] for info in client.list_objects()] == ["reply"]


def test_the_reload_command(app: BrokerApp, world: World) -> None:
    """``shared-rpc reload``, with the policy for objects."""
    client = app.serve()
    client.call("answer")
    app.write(NEW)

    def reload(*options: str) -> tuple[int, str]:
        child = world.start("-m", "shared_rpc.cli", "reload", *options, cwd=app.file.parent)
        output, _ = child.process.communicate(timeout=50)
        return child.process.returncode, output.strip()

    assert reload("--drop", "none") == (0, f"reloaded {app.base_path}-cpu.sock: answer changed, 0 objects dropped")
    assert client.call("answer").tolist() == [1, 1]
    assert reload("--drop", "all")[0] == 0
    assert client.call("answer").tolist() == [2, 2]
    app.write("import os; os._exit(0)")
    assert reload()[0] == 1


@pytest.mark.asyncio
async def test_refused_reloads_of_clients_that_left_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The refusal is for the client; asyncio would log it as an error with a traceback."""
    broker = Broker(WorkerCommand("app.py", ServeOptions()))
    reload = asyncio.create_task(broker._reload_for_client("no such objects"))
    await asyncio.sleep(0)
    reload.cancel()
    await asyncio.sleep(0.01)
    assert reload.cancelled()
    del reload  # asyncio logs an error when its task is collected
    gc.collect()
    assert not caplog.records
