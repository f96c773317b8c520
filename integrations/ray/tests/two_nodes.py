"""Run the deployment of ``examples/ray_serve`` on this machine: two Ray nodes, two replicas on each, and one copy of the model
per node.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

#: The example.
HERE = Path(__file__).resolve().parents[3] / "examples" / "ray_serve"
REPLICAS = 4
#: Seconds within which all replicas must answer.
PATIENCE = 240.0


def main() -> None:
    """Start the nodes, query all replicas, and check their answers."""
    # Ray's workers inherit the environment of their node: the role here, and below a base path for each node.
    os.environ["SHARED_TENSOR_ROLE"] = "spawn"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory(prefix="ray-serve-") as folder:
        bases = [f"{folder}/{name}" for name in ("first", "second")]
        try:
            replicas = asked(bases)
        finally:
            for base in bases:
                stop(base)
    check(replicas)


def asked(bases: list[str]) -> list[dict[str, Any]]:
    """Run the deployment on two nodes; print the objects of each server, and return the answer of each replica."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    os.environ["SHARED_TENSOR_BASE_PATH"] = bases[0]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1, env_vars={"SHARED_TENSOR_BASE_PATH": bases[1]})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        serve.start(http_options={"location": "NoServer"})
        from app import app

        handle = serve.run(app)
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + PATIENCE
        while len(found) < REPLICAS:
            if time.monotonic() > until:
                raise SystemExit(f"only {len(found)} of {REPLICAS} replicas answered within {PATIENCE:g} s")
            for answer in [handle.replica.remote() for _ in range(2 * REPLICAS)]:
                replica = answer.result()
                found[replica["pid"]] = replica
        for base in bases:
            describe(base)
        return list(found.values())
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def describe(base: str) -> None:
    """Print the objects of a node's server, and the number of holders."""
    from shared_rpc import Client

    with Client(base) as client:
        for info in client.list_objects():
            mib = info["nbytes"] / 2**20
            print(f"{base}: {info['endpoint']}() once, {mib:.0f} MiB, held by {info['leases']} replicas", flush=True)


def check(replicas: list[dict[str, Any]]) -> None:
    """Check that the replicas of a node share one object, and that all answers are equal."""
    by_node: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for replica in replicas:
        by_node[replica["node"]].append(replica)
        print(
            f"replica {replica['pid']} on node {replica['node'][:8]}: object {replica['object']} of server {replica['server']}"
        )
    assert len(by_node) == 2, f"{len(by_node)} nodes have replicas"
    for node, there in by_node.items():
        objects = {(replica["server"], replica["object"]) for replica in there}
        assert len(objects) == 1, f"node {node} has {len(objects)} copies of the model"
    assert len({replica["server"] for replica in replicas}) == 2, "the nodes share a server"
    assert {replica["role"] for replica in replicas} == {"spawn"}
    answers = {replica["answer"] for replica in replicas}
    assert len(answers) == 1, f"the replicas disagree: {answers}"
    print(f"{len(replicas)} replicas on {len(by_node)} nodes, one copy of the model on each; all answer {answers.pop():.6f}")


def stop(base: str) -> None:
    """Stop a node's server, which would otherwise exit an hour after its last use."""
    words = [sys.executable, "-m", "shared_rpc.cli", "stop", "--base-path", base]
    subprocess.run(words, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
