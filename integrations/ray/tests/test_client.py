"""What a cluster's client makes of the answers of its agents. No Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from shared_rpc.errors import ClusterError
from shared_rpc_ray.client import Cluster
from shared_rpc_ray.messages import Group, Key, KeyResult, Version

HERE = Key("load", "load()", Group("f", "cpu", "3.11", "2.11", "0.1"))
THERE = msgspec.structs.replace(HERE, group=msgspec.structs.replace(HERE.group, device="cuda"))
FAILED = KeyResult(HERE, None, (), {}, "ValueError: no such weights", b"")
DONE = KeyResult(THERE, Version(2, "d"), ("b",), {}, "", b"")


class Remote(NamedTuple):
    """A method of an actor, whose answer is there at once."""

    answer: Any

    def remote(self, *_: Any) -> Any:
        """Return the answer itself in place of a reference."""
        return self.answer


def cluster(results: list[KeyResult], nodes: list[str]) -> Cluster:
    """A cluster whose agents answer a refresh with these results."""
    made = Cluster.__new__(Cluster)
    made.name, made._timeout = "c", None
    actors = {"agent": SimpleNamespace(key_of=Remote(HERE))}
    if nodes:
        actors["directory"] = SimpleNamespace(refresh=Remote(results))

    def find(name: str) -> Any:
        if name not in actors:
            raise ClusterError(f"there is no {name}")
        return actors[name]

    exceptions = SimpleNamespace(GetTimeoutError=TimeoutError, RayTaskError=KeyError)
    address = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    made._ray = SimpleNamespace(get=lambda reference, timeout: reference, exceptions=exceptions, util=address)
    made._membership = SimpleNamespace(
        named=lambda *_: nodes, find=find, actor_name=lambda _, role, *__: role, LOST=(ConnectionError,)
    )
    return made


def test_a_refresh_that_failed_is_raised() -> None:
    """For the kind of nodes that was asked, whatever became of others."""
    with pytest.raises(ClusterError, match="no such weights"):
        cluster([DONE, FAILED], ["a"]).refresh("load")


def test_a_refresh_of_all_kinds_has_the_failed_ones() -> None:
    """The asked node's kind is the first."""
    changes = cluster([DONE, FAILED], ["a"]).refresh_all("load")
    assert [(change.version, change.error) for change in changes] == [(None, FAILED.error), (2, "")]


def test_a_refresh_that_failed_everywhere_is_raised() -> None:
    """There is no outcome to return."""
    with pytest.raises(ClusterError, match="no such weights"):
        cluster([FAILED], ["a"]).refresh_all("load")


def test_the_status_of_a_cluster_without_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory is not waited for: there is none."""
    monkeypatch.setattr("shared_rpc_ray.client.time.sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(ClusterError, match="cluster 'c' has no nodes"):
        cluster([], []).status()
