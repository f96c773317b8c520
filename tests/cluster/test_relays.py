"""Nodes that are still receiving an object send the parts on that they have; they are lost, and get damaged bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.processes import Child
from tests.kit.ray_sites import Site, Sites, until

pytestmark = pytest.mark.timeout(200)

#: MiB of the object: four parts.
SIZE = 60


class Relaying:
    """A source that has as many receivers as it serves, and these have been held up; and one more, which came late."""

    def __init__(self, cluster: Sites, name: str) -> None:
        while len(cluster.sites) < 4:
            cluster.add()
        cluster.all_joined()
        self.cluster, self.name = cluster, name
        self.source, self.late, *self.relays = cluster.sites[:4]
        self.digest = self.source.load(name, SIZE).digest
        self.nodes = {site.node: site for site in self.relays}
        self.held = [cluster.hold("take", site, parts=2) for site in self.relays]
        self.children: list[tuple[Site, Child]] = [(site, site.start(name, SIZE)) for site in self.relays]
        try:
            until(lambda: all(map(self._has_part, self.relays)), "the relays have a part of it")
        except AssertionError as error:
            raise AssertionError(f"{error}: {cluster.key(name)}, {cluster.status()['nodes']}") from error
        self.children.append((self.late, self.late.start(name, SIZE)))
        until(lambda: self._relay() is not None, "one of them has sent on what it has")
        relay = self._relay()
        assert relay is not None
        #: The one that the late node receives from.
        self.relay = relay

    def _relay(self) -> Site | None:
        source, nbytes = self.late.arriving(self.name)
        return self.nodes.get(source) if nbytes else None

    def _has_part(self, site: Site) -> bool:
        # One whose source has failed before may receive from the other one, which is held up.
        return self.cluster.held("take", site) or site.arriving(self.name)[1] > 0

    def spoil(self) -> Path:
        """Have the next part change that the relay gets."""
        return self.cluster.hold("spoil", self.relay, parts=1)

    def go_on(self) -> None:
        """Let all go on."""
        for held in self.held:
            held.unlink(missing_ok=True)

    def all_have_it(self, *but: Site) -> bool:
        """Whether the processes of all nodes get the bits that the source has built, but those of some."""
        found = [site.got(child) for site, child in self.children if site not in but]
        for got in found:
            got.close()
        assert self.cluster.builds(self.name) == [self.source.name]
        return {got.digest for got in found} == {self.digest}


@pytest.fixture
def relaying(cluster: Sites, name: str) -> Iterator[Relaying]:
    """A late node that receives from a node that is still receiving; what a test leaves held up goes on."""
    relaying = Relaying(cluster, name)
    yield relaying
    relaying.go_on()


def test_a_late_node_receives_from_nodes_that_are_still_receiving(cluster: Sites, relaying: Relaying) -> None:
    """It has parts from there while they miss others; nobody builds a second time."""
    doing = cluster.status()["nodes"][relaying.late.node]["doing"]
    assert [found["source"] for found in doing] == [relaying.relay.node]
    assert all(cluster.held("take", relay) for relay in relaying.relays)
    until(lambda: relaying.relay.arriving(relaying.name)[0] == relaying.source.node, "its status says so")
    relaying.go_on()
    assert relaying.all_have_it()


def test_damage_on_the_way_to_a_relay_ends_there(cluster: Sites, relaying: Relaying) -> None:
    """It sees it, and sends on only what is whole; who waits for that waits, and does not blame it."""

    def blamed() -> set[str]:
        return {name for name, node in cluster.status()["nodes"].items() if node["demerits"]}

    earlier, before = blamed(), len(relaying.late.log)
    relaying.spoil()
    relaying.go_on()
    assert relaying.all_have_it()
    assert relaying.relay.says("do not fit: 15728640 bytes at 31457280 of segment 0 arrived as 15728640 bytes")
    assert relaying.relay.says(f"from {relaying.source.node}")
    assert not any("failed here" in line for line in relaying.late.log[before:])
    # The source is, until a later transfer from it is a good one.
    until(lambda: blamed() <= earlier | {relaying.source.node}, "nobody else is blamed")


@pytest.mark.parametrize("loss", ["agent", "node"])
def test_a_relay_is_lost(cluster: Sites, relaying: Relaying, loss: str) -> None:
    """Who receives from it receives the rest from another node."""
    losses: dict[str, Callable[[Site], None]] = {"agent": Site.kill_agent, "node": Site.lose}
    losses[loss](relaying.relay)
    relaying.go_on()
    assert relaying.all_have_it(*([relaying.relay] if loss == "node" else []))
