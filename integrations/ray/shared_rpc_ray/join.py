"""The joiner makes a server part of a cluster, as ``python -m shared_rpc_ray.join --name NAME --socket PATH``.

It is a driver of Ray. It creates the agent of its node, which is no child of it and outlives it, prints the agent's messages
for the server's log, and creates another agent when that ends. When Ray ends, so does the joiner; the server starts another
one, which waits for Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import signal
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import ray
from ray import experimental
from ray.exceptions import RayError

from shared_rpc.errors import ClusterError, ConfigurationError, SharedRPCError
from shared_rpc.settings import source_token
from shared_rpc_ray.agent import NodeAgent
from shared_rpc_ray.membership import actor_name, alive_nodes, cluster_settings, connect, find_or_create, node_of
from shared_rpc_ray.messages import AgentPlace

#: Seconds between two attempts to have an agent.
_PAUSE = 0.5
#: Seconds between two attempts to find Ray: joiners wait for it, whatever is started first.
_RAY_PAUSE = 2.0


def main(words: list[str] | None = None) -> int:
    """Join, and stay joined; return the exit code when Ray is gone."""
    parser = argparse.ArgumentParser(prog="python -m shared_rpc_ray.join", description="Make a server part of a cluster.")
    parser.add_argument("--socket", required=True, help="the server's socket")
    parser.add_argument("--name", help="the cluster's name; SHARED_TENSOR_CLUSTER by default")
    options = parser.parse_args(words)
    try:
        _stay(options.socket, options.name)
    except SharedRPCError as error:
        _print(str(error))
    return 1


def _print(line: str) -> None:
    print(f"cluster: {line}", flush=True)


def _stay(socket: str, name: str | None) -> None:
    """Have an agent until its Ray node is lost."""
    settings = cluster_settings()
    if settings.mover == "nixl" and not hasattr(experimental, "set_target_for_ref"):
        raise ConfigurationError(
            f"SHARED_TENSOR_CLUSTER_MOVER=nixl: Ray {ray.__version__} cannot receive tensors in place; use a later one, "
            f"such as 2.60, or 'objects'"
        )
    logging.getLogger("ray").setLevel(logging.ERROR)
    _wait_for_ray(settings.address)
    # Ray's own handler writes a stack trace into the server's log.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ray_node = node_of(settings.node)
    place = AgentPlace(
        cluster=name or settings.name,
        node=f"{ray_node.address}:{socket}",
        ray_node=ray_node,
        socket=socket,
        mover=settings.mover,
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        token=source_token(),
        facts=facts_here(),
    )
    printed = ""
    while True:
        problem = _with_agent(place)
        if ray_node.id not in alive_nodes():
            raise ClusterError(f"Ray node {ray_node.id} is lost, and with it this server's place in the cluster")
        if problem != printed:
            _print(problem)
        printed = problem
        time.sleep(_PAUSE)


def facts_here() -> dict[str, str]:
    """Return the facts of this process's environment, which is the broker's too."""
    facts = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package, name in (("torch", "torch"), ("shared-rpc", "shared_rpc")):
        try:
            facts[name] = version(package)
        except PackageNotFoundError:
            facts[name] = ""
    return facts


def _wait_for_ray(address: str) -> None:
    waits = False
    while True:
        try:
            return connect(address)
        except ClusterError as error:
            if not isinstance(error.__cause__, ConnectionError):
                raise
            if not waits:
                _print(f"{error}; waiting for one")
            waits = True
            time.sleep(_RAY_PAUSE)


def _with_agent(place: AgentPlace) -> str:
    """Create or find the agent, and print its messages until its process ends; return why it did."""
    # Only an actor with this option takes tensors by Ray's own transports; it imports torch.
    options = {"enable_tensor_transport": True} if place.mover == "nixl" else {}
    agent = find_or_create(NodeAgent, actor_name(place.cluster, "agent", place.node), place.ray_node.id, place, **options)
    try:
        ray_node, broker = ray.get(agent.describe.remote())
        if ray_node != place.ray_node.id:
            raise ClusterError(
                f"the broker at {place.socket} has an agent on Ray node {ray_node} already, and this joiner is one of Ray node "
                f"{place.ray_node.id}: two nodes of a machine need a broker each, at base paths of their own "
                f"(SHARED_TENSOR_BASE_PATH)"
            )
        _print(f"{broker} is part of cluster {place.cluster!r} as {place.node}, by an agent on Ray node {ray_node}")
        while True:
            _print(ray.get(agent.line.remote()))
    except RayError as error:
        # The first line says what has ended; the last one is the error of an agent that could not begin.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"the agent has ended: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
