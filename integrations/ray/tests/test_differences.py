"""Nodes that differ, and what cannot be: other versions and devices, no Ray, a socket that two nodes would share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sites import Site, Sites, until
from tests.kit.processes import PYTHONPATH

pytestmark = pytest.mark.timeout(150)

JOIN = f"{sys.executable} -m shared_rpc_ray.join"
#: A joiner whose node has another fact.
DIFFERING = """
import sys
from shared_rpc_ray import join
facts = dict([sys.argv[1].split("=")])
found = join.facts_here()
join.facts_here = lambda: found | facts
sys.exit(join.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("fact", ["python=3.99", "torch=1.0", "device=NVIDIA A100"])
def test_nodes_that_differ_build_each_for_themselves(cluster: Sites, name: str, victim: Callable[..., Site], fact: str) -> None:
    """The log says why, and the status, and a refresh reaches both kinds."""
    other = victim(cluster=f"{sys.executable} -c '{DIFFERING}' '{fact}'", beside=cluster.sites[0])
    first = cluster.sites[0].load(name)
    assert other.load(name).digest != first.digest
    assert cluster.builds(name) == [cluster.sites[0].name, other.name]
    what, value = fact.split("=")
    until(lambda: other.says(f"{what} ") and other.says(f"and {value} here"), "the log says why")
    assert all(what in key["differs"] for key in cluster.status()["keys"] if f"'{name}'" in key["cache_key"])


def test_two_nodes_cannot_have_one_server(cluster: Sites) -> None:
    """The second joiner is refused; the error names both nodes, and the remedy."""
    first, second, *_ = cluster.sites
    words = (*JOIN.split()[1:], "--socket", first.socket)
    refused = run_app(cluster, first, *words, SHARED_TENSOR_CLUSTER_NODE=second.node_id)
    assert refused.returncode == 1
    assert first.node_id in refused.stdout and second.node_id in refused.stdout
    assert "SHARED_TENSOR_BASE_PATH" in refused.stdout


def test_a_machine_with_several_nodes_wants_one_named(cluster: Sites) -> None:
    """The error has them all."""
    site = cluster.sites[0]
    words = (*JOIN.split()[1:], "--socket", site.socket)
    refused = run_app(cluster, site, *words, SHARED_TENSOR_CLUSTER_NODE="")
    assert refused.returncode == 1
    assert "set SHARED_TENSOR_CLUSTER_NODE" in refused.stdout
    assert all(other.node_id in refused.stdout for other in cluster.sites)


def test_an_unknown_mover_is_an_error(cluster: Sites) -> None:
    """It names those that there are."""
    site = cluster.sites[0]
    words = (*JOIN.split()[1:], "--socket", f"{site.base_path}-x-cpu.sock")
    refused = run_app(cluster, site, *words, SHARED_TENSOR_CLUSTER_MOVER="pigeon")
    assert refused.returncode == 1
    assert "SHARED_TENSOR_CLUSTER_MOVER='pigeon': use objects or nixl" in refused.stdout


def test_a_ray_without_tensors_in_place_is_named(cluster: Sites) -> None:
    """For NIXL it takes a later one."""
    code = (
        "import sys, ray.experimental; del ray.experimental.set_target_for_ref; "
        "from shared_rpc_ray.join import main; sys.exit(main(sys.argv[1:]))"
    )
    refused = run_app(cluster, cluster.sites[0], "-c", code, "--socket", "/x", SHARED_TENSOR_CLUSTER_MOVER="nixl")
    assert refused.returncode == 1
    assert "cannot receive tensors in place" in refused.stdout


def test_importing_the_package_loads_no_ray() -> None:
    """Nor does the part of it that is for clusters."""
    code = "import sys, shared_rpc_ray, shared_rpc_ray.cli, shared_rpc.cli.app; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": PYTHONPATH})


def run_app(cluster: Sites, site: Site, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command in the environment of a site, which ends by itself."""
    variables = {"PYTHONPATH": PYTHONPATH, "PATH": str(Path(sys.executable).parent), **site.environ, **environ}
    return subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, timeout=60, env=variables)
