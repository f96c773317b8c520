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
import signal
import sys
import time
from typing import Any

from shared_rpc.errors import ClusterError, SharedRPCError
from shared_rpc.settings import source_token
from shared_rpc_ray.messages import FACTS, AgentPlace
from shared_rpc_ray.settings import MOVERS, ClusterSettings, cluster_settings, facts_here

__all__ = ["main"]

#: Seconds between two attempts to have an agent.
_PAUSE = 0.5
#: Seconds between two attempts to find Ray: joiners wait for it, whatever is started first.
_RAY_PAUSE = 2.0


def main(words: list[str] | None = None) -> int:
    """Join, and stay joined; return the exit code when Ray is gone."""
    parser = argparse.ArgumentParser(prog="python -m shared_rpc_ray.join", description="Make a server part of a cluster.")
    try:
        settings = cluster_settings()
        parser.add_argument("--socket", required=True, help="the server's socket")
        parser.add_argument("--name", default=settings.name, help="the cluster's name (SHARED_TENSOR_CLUSTER)")
        parser.add_argument("--address", default=settings.address, help="Ray's address (RAY_ADDRESS)")
        parser.add_argument("--node", default=settings.node, help="the Ray node's id, where the machine has several")
        parser.add_argument("--mover", default=settings.mover, choices=MOVERS, help="what carries the bytes")
        parser.add_argument("--fact", action="append", default=[], metavar="NAME=VALUE", help=f"replaces one of {FACTS}")
        options = parser.parse_args(words)
        facts = facts_here(options.fact)
        return _stay(options.socket, ClusterSettings(options.name, options.address, options.node, options.mover), facts)
    except SharedRPCError as error:
        _print(str(error))
        return 1


def _print(line: str) -> None:
    print(f"cluster: {line}", flush=True)


def _stay(socket: str, settings: ClusterSettings, facts: dict[str, str]) -> int:
    try:
        from shared_rpc_ray import membership
    except ImportError as error:
        raise ClusterError(f"Ray cannot be imported: {error}. Install it with: pip install 'shared-rpc[ray]'") from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    _connect(membership, settings.address)
    # Ray's own handler writes a stack trace into the server's log.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ray_node = membership.node_of(settings.node)
    place = AgentPlace(
        cluster=settings.name,
        node=f"{ray_node.address}:{socket}",
        host=ray_node.address,
        ray_node=ray_node.id,
        socket=socket,
        store_nbytes=ray_node.store_nbytes,
        mover=settings.mover,
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        token=source_token(),
        facts=facts,
    )
    printed = ""
    while True:
        problem = _with_agent(membership, place)
        if place.ray_node not in membership.alive_nodes():
            raise ClusterError(f"Ray node {place.ray_node} is lost, and with it this server's place in the cluster")
        if problem and problem != printed:
            _print(problem)
        printed = problem
        time.sleep(_PAUSE)


def _connect(membership: Any, address: str) -> None:
    waits = False
    while True:
        try:
            membership.connect(address)
        except ClusterError as error:
            if not isinstance(error.__cause__, ConnectionError):
                raise
            if not waits:
                _print(f"{error}; waiting for one")
            waits = True
            time.sleep(_RAY_PAUSE)
        else:
            return


def _with_agent(membership: Any, place: AgentPlace) -> str:
    """Create or find the agent, and print its messages until it ends; return why it did."""
    import ray

    from shared_rpc_ray.agent import NodeAgent

    # Only an actor with this option takes tensors by Ray's own transports; it imports torch.
    options = {"enable_tensor_transport": True} if place.mover == "nixl" else {}
    name = membership.actor_name(place.cluster, "agent", place.node)
    agent = membership.find_or_create(NodeAgent, name, place.ray_node, place, **options)
    try:
        ray_node, broker = ray.get(agent.describe.remote())
        if ray_node != place.ray_node:
            raise ClusterError(
                f"the broker at {place.socket} has an agent on Ray node {ray_node} already, and this joiner is one of Ray node "
                f"{place.ray_node}: two nodes of a machine need a broker each, at base paths of their own "
                f"(SHARED_TENSOR_BASE_PATH)"
            )
        _print(f"{broker} is part of cluster {place.cluster!r} as {place.node}, by an agent on Ray node {ray_node}")
        number = 0
        while True:
            lines = ray.get(agent.lines.remote(number))
            number = lines[-1][0]
            for _, line in lines:
                _print(line)
    except membership.LOST as error:
        # The first line says what has ended; the last one is the error of an agent that could not begin.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"the agent has ended: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
