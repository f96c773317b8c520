"""A server or broker keeps a process running that joins it to a cluster; each of the two ends with the other."""

from __future__ import annotations

import os
import signal
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from shared_rpc import Client, Server
from shared_rpc.errors import ConfigurationError
from shared_rpc.server.joiner import check_cluster
from tests.kit.brokers import BrokerApp, is_running
from tests.kit.joiners import FAITHLESS, PROGRAM, command_of, source_of
from tests.kit.processes import eventually, links_of
from tests.kit.world import World


@pytest.fixture
def joiner(tmp_path: Path) -> str:
    """The command line of a joiner."""
    return command_of(tmp_path, PROGRAM)


def attached(client: Client) -> int:
    """Wait until the joiner is the source; return its process id."""
    eventually(lambda: source_of(client)["session"] is not None, 30.0, "a source")
    return int(source_of(client)["pid"])


def test_a_joiner_ends_with_its_broker(app: BrokerApp, tmp_path: Path) -> None:
    """The kernel enforces it."""
    broker = app.start(cluster=command_of(tmp_path, FAITHLESS))
    pid = attached(app.connect())
    broker.kill()
    eventually(lambda: not is_running(pid))


def test_an_ended_joiner_is_restarted(app: BrokerApp, joiner: str) -> None:
    """The broker reports its exit status; calls in between wait for the next one."""
    broker = app.start(cluster=joiner, source_grace=600.0)
    client = app.connect()
    first = attached(client)
    os.kill(first, signal.SIGKILL)
    client.call("held", 1).release()
    info = source_of(client)
    assert info["joiner"]["pid"] == attached(client)
    assert (info["joiner"]["starts"], info["pid"] != first) == (2, True)
    assert info["joiner"]["problem"].endswith(f"(pid {first}) was killed by SIGKILL: the joiner of {client.socket_path} client")
    broker.expect_error("was killed by SIGKILL")
    assert client.get_statistics()["held"]["builds"] == 1


def test_a_joiner_does_not_keep_its_broker_running(app: BrokerApp, joiner: str) -> None:
    """The source of records does not count as a user."""
    broker = app.start(cluster=joiner, idle_exit=1.0)
    assert broker.close()[0] == 0


def test_the_app_or_the_environment_can_name_the_cluster(app: BrokerApp, joiner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option takes precedence over Provider(cluster=...), and that over SHARED_TENSOR_CLUSTER."""
    monkeypatch.setenv("SHARED_TENSOR_CLUSTER", "./rya")
    code, said = app.begin().close()
    assert code == 1 and "cluster='./rya': use a cluster's name, or the command line of a program" in said
    source = app.file.read_text()
    app.file.write_text(source.replace('Provider(device="cpu")', f'Provider(device="cpu", cluster={joiner!r})'))
    app.start().kill()
    app.start(cluster="")
    assert app.connect().get_server_info()["source"] is None


@pytest.fixture
def faithless(tmp_path: Path) -> str:
    """The command line of a joiner that outlives its server."""
    return command_of(tmp_path, FAITHLESS)


def test_a_server_starts_a_joiner(world: World, faithless: str) -> None:
    """It gets the server's socket, answers its misses, and ends with it."""
    world.share("load", managed=True)(lambda: torch.ones(1))
    server = world.serve(cluster=faithless, source_grace=600.0)
    client = world.client()
    client.call("load").release()
    info = source_of(client)
    assert (info["cluster"], info["pid"], info["joiner"]["starts"]) == (faithless, info["joiner"]["pid"], 1)
    assert info["status"] == {"cluster": "test", "node": "a", "nodes": 1}
    assert is_running(info["pid"])
    server.stop()
    assert not is_running(info["pid"])


def test_a_missing_distribution_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra; nothing listens."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    server = Server(world.owner, cluster="prod")
    with pytest.raises(ConfigurationError, match=r"pip install 'shared-rpc\[ray\]'"):
        server.start()
    assert not server.running and not Path(server.socket_path).exists()


def test_a_joiner_ends_with_a_killed_script(faithless: str, world: World) -> None:
    """Even if a process forked by the script, which is not the server's, survives."""
    code = """
    import os, sys, time
    import torch
    from shared_rpc import Client, Provider, Server

    provider = Provider(device="cpu", cluster=sys.argv[1])
    provider.share("load", managed=True)(lambda: torch.ones(1))
    server = Server(provider).start()
    provider.call("load").release()
    if os.fork() == 0:
        print("child", os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
    """
    child = world.process(code, faithless)
    forked = int(child.expect("child").split()[1])
    try:
        with Client(world.base_path, device="cpu") as client:
            pid = source_of(client)["pid"]
        assert not pipes_of(pid) & pipes_of(forked)
        child.process.kill()
        child.process.wait()
        eventually(lambda: not is_running(pid))
        assert is_running(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def pipes_of(pid: int) -> set[str]:
    """Return the pipes of a process."""
    return {link for link in links_of(pid) if link.startswith("pipe:")}


def test_a_failed_joiner_is_reported(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its last line; calls are built after the grace period."""
    wrong = command_of(tmp_path, "raise SystemExit('no cluster is there')")
    world.share("load", managed=True)(lambda: torch.ones(1))
    world.serve(cluster=wrong, source_grace=0.1)
    client = world.client()
    client.call("load").release()
    eventually(lambda: "exited with code 1: no cluster is there" in source_of(client)["joiner"]["problem"])
    assert "the next one is started in 0.5 s" in caplog.text


def test_the_joiner_of_a_named_cluster_is_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started with the cluster's name; nothing of the distribution is imported."""
    found = EntryPoint("join", "some_distribution.join:main", "shared_rpc.cluster")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **asked: [found] if asked["name"] == "join" else [])
    assert check_cluster("prod")[-4:] == ["-m", "some_distribution.join", "--name", "prod"]
