"""A server that joins a cluster keeps a process running for that, which ends with the server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from shared_rpc import Provider, Server
from shared_rpc.errors import ConfigurationError
from tests.kit.apps import Connect, Serve
from tests.kit.brokers import is_running

#: A program that builds every miss of its server where it was asked, as a joiner may.
PROGRAM = """
import sys
from shared_rpc import Client

with Client(socket_path=sys.argv[sys.argv.index("--socket") + 1]) as client, client.source() as source:
    source.report({"cluster": "test", "node": "a", "nodes": 1})
    for miss in source:
        source.build(miss).release()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The command line of that program."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return f"{sys.executable} {file}"


@pytest.mark.usefixtures("no_leaks")
def test_a_server_has_a_joiner(provider: Provider, serve: Serve, connect: Connect, program: str) -> None:
    """It is told the server's socket, answers its misses, and ends with it."""
    provider.share("load", managed=True)(lambda: torch.ones(1))
    server = serve(cluster=program, source_grace=600.0)
    client = connect()
    client.call("load").release()
    info = client.get_server_info()["source"]
    assert info is not None and info["joiner"] is not None
    assert (info["cluster"], info["pid"], info["joiner"]["starts"]) == (program, info["joiner"]["pid"], 1)
    assert info["status"] == {"cluster": "test", "node": "a", "nodes": 1}
    pid = info["joiner"]["pid"]
    assert pid is not None and is_running(pid)
    server.stop()
    assert not is_running(pid)


def test_without_ray_a_server_of_its_cluster_does_not_start(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra; nothing listens."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    server = Server(provider, cluster="ray")
    with pytest.raises(ConfigurationError, match=r"pip install 'shared-rpc\[ray\]'"):
        server.start()
    assert not server.running and not Path(server.socket_path).exists()
