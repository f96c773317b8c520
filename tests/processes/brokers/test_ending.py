"""The end of a broker: without users, and on request."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from shared_rpc import Provider, Server
from tests.kit.brokers import BrokerApp, begun, is_running, worker_pids
from tests.kit.processes import Child, eventually

#: The idle timeout of servers, in seconds.
IDLE = 0.4


def goes_on(broker: Child, seconds: float = 1.0) -> bool:
    """Return whether it is still running after several times the idle timeout of these tests."""
    try:
        broker.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_an_unused_broker_ends(app: BrokerApp) -> None:
    """With its worker and its socket; it reports the reason. An idle connected client counts as use."""
    broker = app.start(idle_exit=IDLE)
    with app.connect() as client:
        (worker,) = worker_pids(client)
        assert goes_on(broker)
    broker.expect("shared-rpc: no client, lease or task for 0.4 s: ends")
    assert broker.close()[0] == 0
    assert not is_running(worker)
    assert not Path(f"{app.base_path}-cpu.sock").exists()


def test_tasks_keep_a_broker_running(app: BrokerApp, tmp_path: Path) -> None:
    """Even after the submitter's end; and so does an unfetched result."""
    broker = app.start(idle_exit=IDLE, result_ttl=3.0)
    with app.connect() as client:
        task = client.submit("slow", str(tmp_path / "go"))
        eventually(begun(tmp_path / "go"))
    assert goes_on(broker)
    (tmp_path / "go").touch()
    with app.connect() as client:
        client.wait_for_task(task)
        kept = client.submit("echo", client.call("model").weight)
        eventually(lambda: client.get_task_status(kept).status == "completed")
    assert goes_on(broker)
    with app.connect() as client:
        assert client.get_task_result(kept)[0, 0] == 4
    assert broker.close()[0] == 0


def test_its_own_workers_do_not_keep_a_broker_running(app: BrokerApp) -> None:
    """Neither their connections nor their leases."""
    app.write("mine = held()\n")
    broker = app.start(idle_exit=IDLE)
    with app.connect() as client:
        info = client.get_server_info()
    assert (info["sessions"], info["clients"], info["leases"]) == (2, 0, 1)
    assert broker.close()[0] == 0


def test_stop_ends_a_broker(app: BrokerApp) -> None:
    """It has exited when the command returns, which prints its former objects; clients keep their memory."""
    broker = app.start()
    client = app.connect()
    model, handle = client.call("model"), client.call("held")
    (worker,) = worker_pids(client)
    stop = stopped(app)
    assert (stop.process.returncode, is_running(broker.pid), is_running(worker)) == (0, False, False)
    line = stop.expect("stopped")
    assert line.startswith(f"stopped pid {broker.pid} at {app.base_path}-cpu.sock: it held 2 objects, ")
    assert line.endswith("; used by others: 1 client, 1 lease")
    assert (model.weight[0, 0], handle.value.tolist()) == (4, [7.0] * 4)
    assert broker.close()[0] == 0
    assert stopped(app).expect_error("no server answers").startswith("shared-rpc: ")


def stopped(app: BrokerApp, *options: str) -> Child:
    """Wait for the end of ``shared-rpc stop``."""
    child = app.world.start("-m", "shared_rpc.cli", "stop", *options, cwd=app.file.parent)
    child.process.wait(30)
    return child


def test_stop_if_idle_refuses_a_used_broker(app: BrokerApp) -> None:
    """The error names its users; it ends after they have left."""
    broker = app.start()
    client = app.connect()
    handle = client.call("held")
    refused = stopped(app, "--if-idle")
    assert refused.expect_error("in use") == f"shared-rpc: the server (pid {broker.pid}) is in use: 1 clients, 1 leases"
    assert (refused.process.returncode, handle.is_stale()) == (1, False)
    client.close()
    assert stopped(app, "--if-idle", "--json").process.returncode == 0
    assert broker.close()[0] == 0


def test_stop_all_ends_every_server(app: BrokerApp, base_path: str) -> None:
    """Of the directory. A server within another program is left and reported; the exit code shows that."""
    broker = app.start()
    other = app.start(socket=f"{base_path}-other.sock")
    with Server(Provider(f"{base_path}-mine", device="cpu")) as mine:
        child = stopped(app, "--all", "--json")
        assert child.process.returncode == 1
        assert "this server is part of process" in child.expect_error(mine.socket_path)
        assert child.process.stdout is not None
        assert {held["pid"] for held in json.loads(child.process.stdout.read())} == {broker.pid, other.pid}
        assert mine.running
    assert [broker.close()[0], other.close()[0]] == [0, 0]
