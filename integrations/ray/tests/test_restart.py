"""Stops and restarts of Ray, which brokers and their clients survive."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sites import Sites, until

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def own(ray_of_its_own: None) -> Iterator[Sites]:
    """A cluster that can be restarted at the same port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sites = Sites(port=port)
    with sites.closing:
        yield sites


def test_brokers_survive_and_rejoin_when_ray_is_restarted(own: Sites) -> None:
    """The cluster then has the objects that they hold; without Ray they build themselves; nothing is built twice."""
    # Both on one node, which then needs no name, although it has another id after the restart.
    first = own.add("--source-grace", "1", SHARED_TENSOR_CLUSTER_NODE="")
    second = own.add("--source-grace", "1", SHARED_TENSOR_CLUSTER_NODE="", beside=first)
    until(lambda: first.joined() and second.joined())
    digest = first.load("kept").digest
    assert second.load("kept").digest == digest
    own.stop_ray()
    until(lambda: not first.status() and not second.status(), "the agents are gone")
    assert first.load("kept").digest == second.load("kept").digest == digest
    alone = first.load("alone").digest
    own.start_ray()
    until(lambda: first.joined() and second.joined(), "they have joined again")
    assert second.load("alone").digest == alone
    assert len(own.key("kept")["nodes"]) == 2
    assert (own.builds("kept"), own.builds("alone")) == ([first.name], [first.name])
    assert first.load("kept").digest == second.load("kept").digest == digest
