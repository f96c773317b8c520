"""Outcomes of changes in the client of a cluster and in ``shared-rpc cluster``, without Ray."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from shared_rpc.errors import ClusterError
from shared_rpc_ray import Change, Cluster
from shared_rpc_ray import cli as commands
from tests.kit.deep import deep

SAID = "(raylet) The node with node id: 7c8e has been marked dead"
DONE = Change("load", "load()", {"device": "cuda"}, 2, ("a",), {})
SLOW = Change("load", "load()", {"device": "cpu"}, 2, ("a",), {"b": "it was too slow"})
FAILED = Change("load", "load()", {"device": "cpu"}, None, (), {}, ClusterError("no such weights"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster without a connection, in whose process Ray prints a line at each use."""
    made = Cluster.__new__(Cluster)

    def said(*_: Any, **__: Any) -> Any:
        print(SAID)
        return made

    made.close = said  # type: ignore[method-assign]
    monkeypatch.setattr("shared_rpc_ray.client.Cluster", said)
    made._timeout = None
    monkeypatch.setattr("shared_rpc_ray.client._got", lambda answer, timeout: answer)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(made, "status", lambda: said() and {"cluster": "c", "nodes": {}, "keys": []})
    return made


def outcomes(cluster: Cluster, *changes: Change) -> None:
    """Set the outcomes of changes."""
    directory = SimpleNamespace(remote=lambda *_: print(SAID) or list(changes))  # type: ignore[func-returns-value]
    cluster._directory = lambda: SimpleNamespace(refresh=directory, invalidate=directory)  # type: ignore[method-assign]


def test_a_refresh_raises_if_it_failed_for_all_kinds_of_nodes(cluster: Cluster) -> None:
    """If it failed for some, only their changes have the error."""
    outcomes(cluster, FAILED, DONE)
    assert cluster.refresh("load") == [FAILED, DONE]
    outcomes(cluster, FAILED, FAILED)
    with pytest.raises(ClusterError, match="no such weights"):
        cluster.refresh("load")


@pytest.mark.parametrize("change", [SLOW, *deep(FAILED)], ids=["left-out", "failed"])
@pytest.mark.parametrize("words", [["refresh", "load"], *deep(["invalidate", "load"])], ids=" ".join)
def test_a_command_fails_if_it_left_nodes_out(cluster: Cluster, words: list[str], change: Change) -> None:
    """The exit code is 1, and the changes are printed."""
    outcomes(cluster, DONE, change)
    ran = CliRunner().invoke(commands.app, words)
    assert ran.exit_code == 1
    assert "version 2 is current" in ran.stdout and ("no such weights" if change.error else "too slow") in ran.stdout


@pytest.mark.parametrize("words", [["status"], ["refresh", "load"], ["invalidate", "load", "size=1"]], ids=" ".join)
def test_rays_output_goes_to_standard_error(cluster: Cluster, words: list[str]) -> None:
    """Standard output has only the command's own output, for programs."""
    outcomes(cluster, DONE)
    ran = CliRunner().invoke(commands.app, [*words, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["cluster"] == "c" if words == ["status"] else found[0]["cache_key"] == "load()"
    assert set(ran.stderr.splitlines()) == {SAID}
