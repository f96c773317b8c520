"""One build per cluster: every process of every node gets the same object by an ordinary call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sites import Site, Sites, got, loading, until

pytestmark = pytest.mark.timeout(120)


def test_an_object_is_built_once_and_has_the_same_bits_on_every_node(cluster: Sites, name: str) -> None:
    """Nodes that call during the build wait. The random weights stay tied; agents load no torch."""
    gate = cluster.mark(f"gate-{name}")
    calls = [site.start(name) for site in cluster.sites]
    until(lambda: len(cluster.key(name)["waiting"]) == 3, "all nodes wait")
    gate.unlink()
    found = [got(call) for call in calls]
    assert len({one.digest for one in found}) == len(cluster.builds(name)) == 1
    assert all(one.tied and one.mode == "client" for one in found)
    for site in cluster.sites:
        if site.gpu is None:  # a GPU's memory is mapped and copied by torch
            assert "libtorch" not in Path(f"/proc/{site.agent_pid()}/maps").read_text()


def test_an_exception_of_the_endpoint_reaches_all_waiting_nodes(cluster: Sites, name: str) -> None:
    """With its own type; the next call tries again."""
    gate, broken = cluster.mark(f"gate-{name}"), cluster.mark(f"broken-{name}")
    children = [site.start(name) for site in cluster.sites]
    until(lambda: len(cluster.key(name)["waiting"]) == 3, "all nodes wait")
    gate.unlink()
    ended = [child.close() for child in children]
    assert all(code == 1 and f"ValueError: no weights of {name} on" in errors for code, errors in ended)
    assert len(cluster.builds(name)) == 1
    broken.unlink()
    assert len({one.digest for one in loading(cluster.sites, name)}) == 1


@pytest.mark.deep
def test_a_late_node_receives_existing_objects(cluster: Sites, name: str, victim: Callable[..., Site]) -> None:
    """Without a build."""
    first = cluster.sites[0].load(name)
    assert victim().load(name).digest == first.digest
    assert len(cluster.builds(name)) == 1


def test_an_object_may_be_larger_than_the_object_store(cluster: Sites, name: str, victim: Callable[..., Site]) -> None:
    """It passes through stores of 80 MiB in parts."""
    small = victim(store=80 << 20)
    first = small.load(name, 100)
    other = cluster.sites[0].load(name, 100)
    assert other.digest == first.digest
    assert cluster.builds(name) == [small.name]
    assert cluster.sites[1].load(f"{name}-back", 100).digest == small.load(f"{name}-back", 100).digest


@pytest.mark.deep
def test_transfers_work_with_a_store_full_of_other_objects(cluster: Sites, name: str) -> None:
    """Ray spills them to disk."""

    # Ray 2.50 may schedule an actor on a node that was just lost, for example by another test, and then fails it.
    @ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
    class Hoarder:
        def __init__(self) -> None:
            self.kept = [ray.put(bytes(30 << 20)) for _ in range(4)]

        def has_begun(self) -> bool:
            return True

    strategies = [NodeAffinitySchedulingStrategy(site.node_id, soft=False) for site in cluster.sites[:2]]
    hoarders = [Hoarder.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    assert all(ray.get([hoarder.has_begun.remote() for hoarder in hoarders]))
    digest = cluster.sites[0].load(name, 48).digest
    assert cluster.sites[1].load(name, 48).digest == digest
    assert len(cluster.builds(name)) == 1


def test_records_are_transferred_by_nixl_if_both_nodes_select_it(
    cluster: Sites, name: str, victim: Callable[..., Site]
) -> None:
    """Other nodes receive them through the object store."""
    pytest.importorskip("nixl")
    one, two = (victim(SHARED_TENSOR_CLUSTER_MOVER="nixl") for _ in range(2))
    digest = one.load(name, 20).digest
    assert two.load(name, 20).digest == digest
    assert "nixl" in Path(f"/proc/{two.agent_pid()}/maps").read_text()
    assert cluster.sites[0].load(name, 20).digest == digest
    assert cluster.builds(name) == [one.name]


def test_the_status_names_nodes_brokers_objects_and_bytes(cluster: Sites, name: str) -> None:
    """In Python and on the command line; a server shows its own node."""
    loading(cluster.sites, name)
    status = cluster.status()
    sockets = {site.socket for site in cluster.sites}
    assert sockets <= {node["broker"].split(" ")[0] for node in status["nodes"].values()}
    [key] = [key for key in status["keys"] if name in key["cache_key"]]
    assert (len(key["nodes"]), set(key["nodes"].values())) == (3, {key["version"]})
    assert status["bytes_moved"] >= 2 * key["nbytes"]
    words = [sys.executable, "-m", "shared_rpc.cli", "cluster", "status", "--address", cluster.address]
    table, printed = (subprocess.check_output([*words, *more], text=True, timeout=50) for more in ([], ["--json"]))
    assert [found["nodes"] for found in json.loads(printed)["keys"] if name in found["cache_key"]] == [key["nodes"]]
    assert all(socket in table for socket in sockets) and name in table
    own = cluster.sites[0].status()
    assert (own["cluster"], own["state"]) == ("default", "joined") and cluster.sites[0].socket in own["node"]


def test_a_node_receives_a_dropped_object_again(cluster: Sites, name: str) -> None:
    """The others keep theirs, and no node builds."""
    before = loading(cluster.sites, name)
    site = cluster.sites[1]
    assert site.client().invalidate_call_cache("load_model", name) == 1
    assert site.load(name).digest == before[0].digest
    assert len(cluster.builds(name)) == 1
