"""Losses of nodes, agents, brokers and the directory during a build, a transfer and a swap: the others continue."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import ray

from shared_rpc import Client
from shared_rpc.protocol.infos import ObjectInfo
from shared_rpc_ray import Change, Cluster
from shared_rpc_ray.membership import actor_name, find
from sites import Site, Sites, got, loading, until
from tests.kit.deep import deep

pytestmark = pytest.mark.timeout(200)

#: MiB of a transferred object, which has several parts.
SIZE = 48
#: The lost part of a node.
LOSSES: dict[str, Callable[[Site], None]] = {
    "node": Site.lose,
    "agent": Site.kill_agent,
    "broker": Site.kill_broker,
}


@pytest.fixture
def lost(cluster: Sites) -> Site:
    """A fourth site, of which a part will be lost; reused by the next test if its node survives."""
    site = cluster.sites[3] if len(cluster.sites) > 3 else cluster.add()
    if not site.serves:
        site.serve()
    until(site.joined, "it has joined")
    return site


@pytest.mark.parametrize("loss", ["broker", *deep("node")])
def test_another_node_builds_when_the_builder_is_lost(cluster: Sites, name: str, lost: Site, loss: str) -> None:
    """The waiting nodes get the object of the other builder."""
    gate = cluster.mark(f"gate-{name}")
    lost.start(name)
    until(lambda: cluster.builds(name) == [lost.name], "it builds")
    calls = [site.start(name) for site in cluster.sites[:3]]
    until(lambda: len(cluster.key(name)["waiting"]) == 4, "the others wait")
    LOSSES[loss](lost)
    gate.unlink()
    assert len({got(call).digest for call in calls}) == 1
    assert len(cluster.builds(name)) == 2


def test_a_build_continues_without_its_agent(cluster: Sites, name: str, lost: Site) -> None:
    """The next agent finds it in the broker: no other node builds, and all get it."""
    gate = cluster.mark(f"gate-{name}")
    mine = lost.start(name)
    until(lambda: cluster.builds(name) == [lost.name], "it builds")
    other = cluster.sites[0].start(name)
    until(lambda: len(cluster.key(name)["waiting"]) == 2, "another node waits")
    before = lost.agent_pid()
    lost.kill_agent()
    until(lambda: lost.joined() and lost.agent_pid() not in (None, before), "there is another agent")
    gate.unlink()
    assert got(mine).digest == got(other).digest
    assert cluster.builds(name) == [lost.name]


@pytest.mark.parametrize("loss", ["node", *deep("agent", "broker")])
def test_a_transfer_survives_the_loss_of_its_source(cluster: Sites, name: str, lost: Site, loss: str) -> None:
    """Another node sends the remaining bytes."""
    first, second, *_ = cluster.sites
    lost.load(name, SIZE)
    first.load(name, SIZE)
    held = cluster.hold("give", lost)
    keeps = cluster.hold("give", first)
    call = second.start(name, SIZE)
    until(lambda: cluster.held("give", lost) or cluster.held("give", first), "it is being sent")
    LOSSES[loss](lost)
    held.unlink()
    keeps.unlink()
    assert got(call).digest == first.load(name, SIZE).digest
    assert cluster.builds(name) == [lost.name]


@pytest.mark.parametrize("loss", ["node", *deep("agent", "broker")])
def test_a_transfer_survives_the_loss_of_a_receiver(cluster: Sites, name: str, lost: Site, loss: str) -> None:
    """The others continue, the source keeps nothing for it, and a restarted agent receives the object."""
    first, second, *_ = cluster.sites
    digest = first.load(name, SIZE).digest
    source = first.client()

    def in_use() -> bool:
        return any(found["leases"] for found in objects_of(source, name))

    until(lambda: not in_use(), "the process that loaded it has ended")
    held = cluster.hold("take", lost)
    call = lost.start(name, SIZE)
    until(lambda: cluster.held("take", lost), "it is being received")
    LOSSES[loss](lost)
    if loss != "agent":  # the next one would receive it
        until(lambda: not in_use(), "the source has ended the transfer")
    held.unlink()
    assert second.load(name, SIZE).digest == digest
    if loss == "agent":
        assert got(call).digest == digest
    assert cluster.builds(name) == [first.name]


def objects_of(client: Client, name: str) -> list[ObjectInfo]:
    """Return the objects of a name, current or not."""
    return [found for found in client.list_objects() if f"'{name}'" in str(found["cache_key"])]


@pytest.mark.parametrize("loss", ["node", *deep("agent", "broker")])
def test_a_swap_survives_the_loss_of_a_node(
    cluster: Sites, name: str, lost: Site, loss: str, threads: ThreadPoolExecutor
) -> None:
    """It has the new version, another node does not yet: the others switch when all are ready."""
    first, second, third = cluster.sites[:3]
    [before, *_] = loading([first, second, third, lost], name)
    node = lost.node

    def received() -> int:
        return int(cluster.status()["nodes"][node]["bytes_received"])

    before_bytes = received()
    held = cluster.hold("take", third)
    refresh: Future[list[Change]] = threads.submit(Cluster(timeout=150.0).refresh, "load_model", name)
    until(lambda: cluster.held("take", third), "one node is not ready")
    until(lambda: received() > before_bytes, "the other one is")
    assert first.load(name).digest == before.digest
    LOSSES[loss](lost)
    if loss != "agent":  # a restarted agent has the object
        until(lambda: node not in cluster.status()["nodes"], "the loss is noticed")
    held.unlink()
    [done] = refresh.result(120)
    assert {first.node, second.node} <= set(done.nodes)
    # If the loss was detected late, the directory has not waited for the delayed node.
    until(lambda: cluster.key(name)["nodes"].get(third.node) == done.version, "all have changed over")
    after = loading([first, second, third], name)
    assert len({one.digest for one in after}) == 1 and after[0].digest != before.digest
    if loss == "agent":
        until(lambda: cluster.key(name)["nodes"].get(node) == done.version, "it has changed over too")
        assert lost.load(name).digest == after[0].digest


def test_the_directory_moves_to_another_node(cluster: Sites, name: str, victim: Callable[..., Site]) -> None:
    """If its node is lost; the test uses a separate cluster."""
    first, second = (victim(cluster="other") for _ in range(2))
    digest = first.load(name).digest
    assert second.load(name).digest == digest
    first.lose()
    assert second.load(name).digest == digest
    third = victim(cluster="other", beside=cluster.sites[0])
    assert third.load(name).digest == digest
    assert cluster.builds(name) == [first.name]


@pytest.mark.deep
def test_a_build_survives_the_loss_of_the_directory(cluster: Sites, name: str) -> None:
    """The agents report objects and builds to the next directory: no node builds twice."""
    gate = cluster.mark(f"gate-{name}")
    calls = [site.start(name) for site in cluster.sites[:3]]
    until(lambda: len(cluster.key(name)["waiting"]) == 3, "all wait")
    ray.kill(find(actor_name("default", "directory")), no_restart=False)
    until(lambda: len(cluster.key(name)["waiting"]) >= 2 and cluster.key(name)["building"], "it knows who builds")
    gate.unlink()
    assert len({got(call).digest for call in calls}) == len(cluster.builds(name)) == 1


@pytest.mark.deep
def test_a_transfer_survives_the_loss_of_the_directory(cluster: Sites, name: str) -> None:
    """The next directory continues it."""
    first, second, *_ = cluster.sites
    digest = first.load(name, SIZE).digest
    held = cluster.hold("take", second)
    call = second.start(name, SIZE)
    until(lambda: cluster.held("take", second), "it is being received")
    ray.kill(find(actor_name("default", "directory")), no_restart=False)
    until(lambda: name in str(cluster.key(name).get("cache_key")), "there is another directory")
    held.unlink()
    assert got(call).digest == digest
    assert cluster.builds(name) == [first.name]


def test_a_swap_survives_the_loss_of_the_directory(cluster: Sites, name: str, threads: ThreadPoolExecutor) -> None:
    """The next directory restarts the refresh: all nodes have one version, and no candidate is left."""
    *_, third = cluster.sites[:3]
    [before, *_] = loading(cluster.sites[:3], name)
    held = cluster.hold("take", third)
    refresh = threads.submit(Cluster(timeout=100.0).refresh, "load_model", name)
    until(lambda: cluster.held("take", third), "one node is not ready")
    ray.kill(find(actor_name("default", "directory")), no_restart=False)
    until(lambda: len(cluster.builds(name)) == 3, "another directory has begun again")
    assert third.load(name).digest == before.digest
    held.unlink()
    [done] = refresh.result(100)
    assert len(done.nodes) == 3
    [after, *others] = loading(cluster.sites[:3], name)
    assert {one.digest for one in others} == {after.digest} != {before.digest}
    clients = [site.client() for site in cluster.sites[:3]]
    until(lambda: sum(len(objects_of(client, name)) for client in clients) == 3, "the lost directory's candidates are released")


def test_a_killed_joiner_is_restarted(cluster: Sites, name: str, lost: Site) -> None:
    """The agent is not affected."""
    before, joiner = lost.agent_pid(), lost.source()["joiner"]
    os.kill(joiner["pid"], signal.SIGKILL)
    until(lambda: lost.source()["joiner"]["starts"] == joiner["starts"] + 1, "there is another one")
    assert lost.agent_pid() == before
    assert lost.load(name).digest == cluster.sites[0].load(name).digest
