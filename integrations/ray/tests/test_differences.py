"""Nodes that differ in versions or devices, and refused joiners: without Ray, or with a socket of another node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sites import Site, Sites
from tests.kit.deep import deep
from tests.kit.processes import PYTHONPATH

pytestmark = pytest.mark.timeout(150)

#: A joiner whose node has another fact.
DIFFERING = """
import sys
from shared_rpc_ray import join
versions = join.installed_versions() | dict([sys.argv[1].split("=")])
join.installed_versions = lambda: versions
sys.exit(join.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("fact", ["python=3.99", *deep("torch=1.0", "device=NVIDIA A100")])
def test_nodes_that_differ_build_separately(cluster: Sites, name: str, victim: Callable[..., Site], fact: str) -> None:
    """The status lists the difference."""
    other = victim(cluster=f"{sys.executable} -c '{DIFFERING}' '{fact}'", beside=cluster.sites[0])
    first = cluster.sites[0].load(name)
    assert other.load(name).digest != first.digest
    assert cluster.builds(name) == [cluster.sites[0].name, other.name]
    what, _ = fact.split("=")
    assert all(what in key["differs"] for key in cluster.status()["keys"] if f"'{name}'" in key["cache_key"])


NO_TARGETS = "import ray.experimental; vars(ray.experimental).pop('set_target_for_ref', None); "
#: Reasons to refuse a joiner: its environment, code that runs first, and its output, without the ids of these nodes.
REFUSALS = {
    "two nodes cannot have one server": ({"SHARED_TENSOR_CLUSTER_NODE": 1}, "", "SHARED_TENSOR_BASE_PATH", [0, 1]),
    "a machine with several nodes needs a selection": (
        {"SHARED_TENSOR_CLUSTER_NODE": ""},
        "",
        "set SHARED_TENSOR_CLUSTER_NODE",
        [0, 1, 2],
    ),
    "an unknown mover": ({"SHARED_TENSOR_CLUSTER_MOVER": "pigeon"}, "", "MOVER='pigeon': use objects or nixl", []),
    "no tensors in place": ({"SHARED_TENSOR_CLUSTER_MOVER": "nixl"}, NO_TARGETS, "cannot receive tensors in place", []),
}


@pytest.mark.parametrize("what", ["two nodes cannot have one server", *deep(*[*REFUSALS][1:])])
def test_a_refused_joiner_prints_the_reason(cluster: Sites, what: str) -> None:
    """With the nodes, if relevant, and the remedy."""
    environ, before, printed, named = REFUSALS[what]
    site, *_ = cluster.sites
    ids = [found.node_id for found in cluster.sites]
    variables = {name: ids[value] if isinstance(value, int) else value for name, value in environ.items()}
    code = f"{before}import sys; from shared_rpc_ray.join import main; sys.exit(main(['--socket', {site.socket!r}]))"
    refused = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": PYTHONPATH, "PATH": str(Path(sys.executable).parent), **site.environ, **variables},
    )
    assert refused.returncode == 1
    assert printed in refused.stdout and all(ids[number] in refused.stdout for number in named)


def test_importing_the_package_loads_no_ray() -> None:
    """Nor do the command line, its part for clusters, and the client."""
    modules = "shared_rpc_ray, shared_rpc_ray.cli, shared_rpc.cli.app, shared_rpc.operations.client"
    code = f"import sys, {modules}; sys.exit('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "PYTHONPATH": PYTHONPATH})
    assert done.returncode == 0
