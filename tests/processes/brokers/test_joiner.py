"""A broker keeps a process running that joins it to a cluster; each of the two ends with the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shared_rpc import Client
from tests.kit.brokers import BrokerApp, is_running
from tests.kit.joiners import FAITHLESS, PROGRAM, command_of, source_of
from tests.kit.processes import Child, eventually


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The command line of a joiner."""
    return command_of(tmp_path, PROGRAM)


def attached(client: Client) -> int:
    """Wait until the joiner is the source; return its process id."""
    eventually(lambda: source_of(client)["session"] is not None, 30.0, "a source")
    return int(source_of(client)["pid"])


def test_a_joiner_ends_with_its_broker(app: BrokerApp, tmp_path: Path) -> None:
    """The kernel enforces it."""
    broker = app.start("--cluster-program", command_of(tmp_path, FAITHLESS))
    pid = attached(app.connect())
    broker.kill()
    eventually(lambda: not is_running(pid))


def test_an_ended_joiner_is_restarted(app: BrokerApp, program: str) -> None:
    """The broker reports its exit status; calls in between wait for the next one."""
    broker = app.start("--cluster-program", program, "--source-grace", "600")
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


def test_a_joiner_does_not_keep_its_broker_running(app: BrokerApp, program: str) -> None:
    """The source of records does not count as a user."""
    broker = app.start("--cluster-program", program, "--idle-exit", "1")
    assert broker.close()[0] == 0


def test_the_app_or_the_environment_can_name_the_cluster(app: BrokerApp, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option takes precedence over Provider(cluster=...), and that over SHARED_TENSOR_CLUSTER."""
    monkeypatch.setenv("SHARED_TENSOR_CLUSTER", "./rya")
    child = Child("-m", "shared_rpc.cli", "serve", str(app.file), cwd=app.file.parent)
    code, said = child.close()
    assert code == 1 and "cluster='./rya': use a cluster's name, or the command line of a program" in said
    source = app.file.read_text()
    app.file.write_text(source.replace('Provider(device="cpu")', f'Provider(device="cpu", cluster={program!r})'))
    app.start().kill()
    app.start("--cluster-program", "")
    assert app.connect().get_server_info()["source"] is None
