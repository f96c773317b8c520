"""Refreshes and invalidations on every node; nodes that fail are left out, reported, and updated later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared_rpc.errors import ClusterError, EndpointNotFound
from shared_rpc_ray import Cluster
from sites import Site, Sites, loading, until

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def users(cluster: Sites) -> Cluster:
    """The client of the cluster in a user's process."""
    return Cluster(timeout=100.0)


def test_a_refresh_is_built_once_and_reaches_every_node(cluster: Sites, name: str, users: Cluster) -> None:
    """One node builds, and all switch."""
    before = loading(cluster.sites, name)
    [change] = users.refresh("load_model", name)
    assert (change.version, len(change.nodes), change.left_out) == (2, 3, {})
    after = loading(cluster.sites, name)
    assert len(cluster.builds(name)) == 2
    assert {got.digest for got in after}.isdisjoint({before[0].digest}) and len({got.digest for got in after}) == 1
    assert {got.generation for got in after} == {2}


def test_a_refresh_without_holders_builds_the_object(cluster: Sites, name: str, users: Cluster) -> None:
    """Once; the other nodes receive it on request."""
    [change] = users.refresh("load_model", name)
    assert (len(change.nodes), change.left_out) == (1, {})
    assert len({got.digest for got in loading(cluster.sites, name)}) == 1
    assert len(cluster.builds(name)) == 1


def test_concurrent_refreshes_are_serialised(cluster: Sites, name: str, users: Cluster, threads: ThreadPoolExecutor) -> None:
    """All nodes finally have the later version."""
    loading(cluster.sites, name)
    gate = cluster.mark(f"gate-{name}")
    first = threads.submit(users.refresh, "load_model", name)
    until(lambda: len(cluster.builds(name)) == 2, "the first one builds")
    second = threads.submit(users.refresh, "load_model", name)
    gate.unlink()
    assert {change.version for queued in (first, second) for change in queued.result(60)} == {2, 3}
    assert cluster.key(name)["version"] == 3
    assert len({got.digest for got in loading(cluster.sites, name)}) == 1


def test_an_exception_of_the_endpoint_is_raised_and_changes_nothing(cluster: Sites, name: str, users: Cluster) -> None:
    """It has its own type."""
    [before, *_] = loading(cluster.sites, name)
    cluster.mark(f"broken-{name}")
    with pytest.raises(ValueError, match=f"no weights of {name}"):
        users.refresh("load_model", name)
    assert {got.digest for got in loading(cluster.sites, name)} == {before.digest}


def test_the_next_call_rebuilds_an_invalidated_object(cluster: Sites, name: str, users: Cluster) -> None:
    """Once, for all nodes."""
    [before, *_] = loading(cluster.sites, name)
    [change] = users.invalidate("load_model", name)
    assert (change.version, len(change.nodes), change.left_out) == (None, 3, {})
    after = loading(cluster.sites, name)
    assert {got.digest for got in after}.isdisjoint({before.digest}) and len({got.digest for got in after}) == 1
    assert len(cluster.builds(name)) == 2


def test_a_node_that_fails_an_invalidation_drops_its_object_later(cluster: Sites, name: str, users: Cluster) -> None:
    """It is reported, and serves its stale object until it drops it."""
    third = cluster.sites[2]
    [before, *_] = loading(cluster.sites, name)
    refused = cluster.hold("refuse", third)
    try:
        [change] = users.invalidate("load_model", name)
        assert set(change.left_out) == {third.node} and "not today" in change.left_out[third.node]
        assert third.load(name).digest == before.digest
    finally:
        refused.unlink()
    until(lambda: not cluster.key(name)["nodes"], "it has dropped it")
    assert third.load(name).digest != before.digest


def test_damaged_parts_come_from_another_node(cluster: Sites, name: str) -> None:
    """The digest of a part differs: no node gets a damaged object."""
    first, second, third = cluster.sites
    digest = first.load(name).digest
    damage = cluster.hold("damage", first)
    assert second.load(name).digest == digest
    assert not damage.exists(), "a damaged part was sent"
    assert third.load(name).digest == digest
    assert len(cluster.builds(name)) == 1


def test_a_node_that_receives_only_damaged_parts_is_left_out_and_updated_later(
    cluster: Sites, name: str, users: Cluster
) -> None:
    """A refresh does not wait for it, and reports it; later it receives the version of the others."""
    first, second, third = cluster.sites
    loading(cluster.sites, name)
    refused = cluster.hold("refuse", third)
    try:
        [change] = users.refresh("load_model", name)
        assert set(change.left_out) == {third.node} and set(change.nodes) == {first.node, second.node}
        assert "not today" in change.left_out[third.node]
        assert first.load(name).digest == second.load(name).digest != third.load(name).digest
    finally:
        refused.unlink()
    until(lambda: cluster.key(name)["nodes"].get(third.node) == change.version, "it has the new version")
    assert third.load(name).digest == first.load(name).digest


def test_a_quota_of_one_node_fails_its_callers_alone(cluster: Sites, name: str, victim: Callable[..., Site]) -> None:
    """They get an error that names the quota; the others have the object."""
    kind = cluster.sites[2].device.partition(":")[0]
    small = victim("--quota", f"{kind}=8MiB", beside=cluster.sites[2])
    first = cluster.sites[0].load(name, 16)
    code, errors = small.start(name, 16).close()
    assert code == 1
    assert "ClusterError" in errors and "quota" in errors
    assert cluster.sites[1].load(name, 16).digest == first.digest
    assert len(cluster.builds(name)) == 1


def test_an_endpoint_that_no_node_has_is_named(cluster: Sites, users: Cluster) -> None:
    """And so is an uncached call."""
    with pytest.raises(EndpointNotFound, match="no_such"):
        users.refresh("no_such")
    for ask in (lambda another: another.refresh("load_model"), Cluster.status):
        with pytest.raises(ClusterError, match="has no nodes"):
            ask(Cluster("another"))
