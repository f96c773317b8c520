"""NIXL as the mover of a cluster: records are read into their rooms, and what it cannot do, the object store does."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.kit.ray_sites import Site, Sites, until

pytestmark = pytest.mark.timeout(200)

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")

#: The environments of brokers whose agents want NIXL; those of tests have gates.
NIXL = {"SHARED_TENSOR_CLUSTER_MOVER": "nixl"}
HELD = {"SHARED_TENSOR_CLUSTER_MOVER": "tests.cluster.movers:HeldNixlMover"}
[HELD_NAME] = HELD.values()

#: What is lost of a node.
LOSSES: dict[str, Callable[[Site], None]] = {
    "node": Site.lose,
    "agent": Site.kill_agent,
    "broker": Site.kill_broker,
}
#: What a node may lack.
LACKS = ["package", "transport"]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def cluster(ray_of_its_own: None, request: pytest.FixtureRequest) -> Iterator[Sites]:
    """Two sites whose agents move by NIXL, with gates; on GPUs, each has the next one."""
    sites = Sites(gpus=torch.cuda.device_count() if request.param == "cuda" else 0)
    try:
        for _ in range(2):
            sites.add(**HELD)
        sites.all_joined()
        yield sites
    finally:
        sites.close()


@pytest.fixture
def pair(cluster: Sites) -> list[Site]:
    """A source and a target."""
    return cluster.sites[:2]


@pytest.fixture(scope="module")
def rich(cluster: Sites) -> Site:
    """A site that has NIXL, and was told to use it."""
    return cluster.add(**NIXL)


@pytest.fixture(scope="module", params=LACKS)
def poor(cluster: Sites, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site that was told so too, and lacks the package, or anything by which UCX could move bytes."""
    folder = tmp_path_factory.mktemp("lacks")
    (folder / "sitecustomize.py").write_text("import sys; sys.modules['nixl'] = None")
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    site = cluster.add(node_environ={"PYTHONPATH": path} if request.param == "package" else {"UCX_TLS": "nothing"}, **NIXL)
    yield site
    site.lose()


def moved(site: Site) -> dict[str, int]:
    """What a node has received, by mover."""
    return dict(site.status().get("bytes_by_mover", {}))


def more(site: Site, before: dict[str, int]) -> dict[str, int]:
    """What it has received since, by mover; a status is published when it is whole."""
    until(lambda: moved(site) != before and not site.status()["activity"], "something was received")
    return {mover: nbytes - before.get(mover, 0) for mover, nbytes in moved(site).items() if nbytes > before.get(mover, 0)}


@needs_nixl
def test_a_record_is_read_into_its_room(cluster: Sites, name: str, pair: list[Site]) -> None:
    """All of its bytes come by NIXL, as every status says; the bits and the ties are the source's, and nobody builds."""
    source, target = pair
    before = moved(target)
    digest = source.load(name, 100).digest
    got = target.load(name, 100)
    assert (got.digest, got.tied) == (digest, True)
    found = more(target, before)
    assert list(found) == [HELD_NAME] and found[HELD_NAME] >= 100 << 20
    until(lambda: cluster.status()["nodes"][target.node]["received_by_mover"] == moved(target), "the directory knows")
    assert cluster.status()["bytes_by_mover"][HELD_NAME] >= found[HELD_NAME]
    assert sum(moved(target).values()) == target.status()["bytes_received"]
    assert cluster.builds(name) == [source.name]


@needs_nixl
def test_no_memory_stays_mapped(name: str, pair: list[Site]) -> None:
    """At neither end, once the record has arrived."""
    if pair[0].gpu is not None:
        pytest.skip("the kernel lists no mappings of a GPU's memory")
    source, target = pair
    assert source.load(name, 20).digest == target.load(name, 20).digest
    for site in pair:
        maps = Path(f"/proc/{site.agent_pid()}/maps")
        until(lambda maps=maps: "/memfd:shared-rpc" not in maps.read_text(), "nothing is mapped")


@needs_nixl
def test_a_damaged_part_is_seen(cluster: Sites, name: str, pair: list[Site]) -> None:
    """The digest is of what the source has, and is compared where the part has arrived."""
    source, target = pair
    digest = source.load(name, 20).digest
    damage = cluster.hold("damage", source)
    try:
        child = target.start(name, 20)
        until(lambda: target.says("the digests do not fit"), "the damage is seen")
    finally:
        damage.unlink()
    got = target.got(child)
    got.close()
    assert got.digest == digest
    assert cluster.builds(name) == [source.name]


@needs_nixl
def test_what_nixl_has_begun_the_object_store_ends(cluster: Sites, name: str, pair: list[Site]) -> None:
    """A transfer that fails goes on with the parts that are missing, which are cut to what the object store takes."""
    source, target = pair
    digest = source.load(name, 100).digest
    before = moved(target)
    breaks = cluster.hold("break", target)
    try:
        assert target.load(name, 100).digest == digest
    finally:
        breaks.unlink()
    found = more(target, before)
    assert set(found) == {HELD_NAME, "objects"}
    assert found[HELD_NAME] == 64 << 20
    assert 0 <= sum(found.values()) - cluster.key(name)["nbytes"] < 4 << 20  # segments are whole pages, of a GPU 2 MiB
    assert "comes by mover 'objects': " in why(target, name) and "not today" in why(target, name)
    assert cluster.builds(name) == [source.name]


@needs_nixl
@pytest.mark.parametrize("loss", LOSSES)
def test_the_source_is_lost(cluster: Sites, name: str, pair: list[Site], victim: Callable[..., Site], loss: str) -> None:
    """A ticket is at hand for memory that is there no more: the bytes come from another node that has them."""
    other, target = pair
    lost = victim(beside=None if loss == "node" else other, **HELD)
    digest = lost.load(name, 100).digest
    held = cluster.hold("take", target)
    child = target.start(name, 100)
    until(lambda: cluster.held("take", target), "it is about to read")
    assert other.load(name, 100).digest == digest
    LOSSES[loss](lost)
    held.unlink()
    got = target.got(child)
    got.close()
    assert got.digest == digest
    assert cluster.builds(name) == [lost.name]


def why(site: Site, name: str) -> str:
    """The only line in a broker's log about how an object came."""
    until(lambda: any(f"'{name}'" in line and "comes by mover" in line for line in site.log), "a line says how it came")
    [line] = [line for line in site.log if f"'{name}'" in line and "comes by mover" in line]
    return line


@needs_nixl
def test_a_source_without_nixl(request: pytest.FixtureRequest, name: str, poor: Site, rich: Site) -> None:
    """The object store carries the record, and a line in the receiver's log says why."""
    digest = poor.load(name, 20).digest
    before = moved(rich)
    assert rich.load(name, 20).digest == digest
    assert list(more(rich, before)) == ["objects"]
    assert "comes by mover 'objects': " in why(rich, name)
    lacks = f"{poor.node} has no mover 'nixl'" if "package" in request.node.name else "an agent of NIXL cannot be made"
    assert lacks in why(rich, name)


@needs_nixl
def test_a_target_without_nixl(request: pytest.FixtureRequest, name: str, poor: Site, rich: Site) -> None:
    """The object store carries the record, and a line in the receiver's log says why."""
    digest = rich.load(name, 20).digest
    before = moved(poor)
    assert poor.load(name, 20).digest == digest
    assert list(more(poor, before)) == ["objects"]
    assert "comes by mover 'objects': " in why(poor, name)
    lacks = "NIXL is not installed" if "package" in request.node.name else "an agent of NIXL cannot be made"
    assert lacks in why(poor, name)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="NIXL is installed")
def test_without_nixl_the_object_store_carries_everything(name: str, rich: Site, victim: Callable[..., Site]) -> None:
    """To ask for it is no error, and a line says that it is not there."""
    source, target = rich, victim(**NIXL)
    assert source.load(name, 20).digest == target.load(name, 20).digest
    assert list(moved(target)) == ["objects"]
    assert target.says("NIXL is not installed")
