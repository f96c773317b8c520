"""The joiner adds a server to a cluster: ``python -m shared_rpc_ray.join --name NAME --socket PATH``.

It is a Ray driver. It creates the agent of its node, which is not its child and outlives it. When the agent or Ray ends, the
joiner exits, with the reason in the server's log; the server starts another joiner, which waits for Ray, and finds or creates
the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time

import ray
from ray import experimental
from ray.exceptions import RayError

from shared_rpc.errors import ClusterError, ConfigurationError, SharedRPCError
from shared_rpc.server.records import installed_versions
from shared_rpc.settings import source_token
from shared_rpc_ray.agent import NodeAgent
from shared_rpc_ray.membership import actor_name, cluster_settings, connect, find_or_create, node_of
from shared_rpc_ray.messages import Place

#: Seconds between two attempts to connect to Ray, which may be started after the server.
_PAUSE = 2.0


def main(words: list[str] | None = None) -> int:
    """Join, and wait until the agent ends; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shared_rpc_ray.join", description="Add a server to a cluster.")
    parser.add_argument("--socket", required=True, help="the server's socket")
    parser.add_argument("--name", help="the cluster's name; SHARED_TENSOR_CLUSTER by default")
    options = parser.parse_args(words)
    try:
        _stay(options.socket, options.name)
    except SharedRPCError as error:
        _print(str(error))
    except RayError as error:
        # The first line names the lost actor; the last one is the error of an agent that could not start.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _print(f"the agent has ended: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}")
    return 1


def _print(line: str) -> None:
    print(f"cluster: {line}", flush=True)


def _stay(socket: str, name: str | None) -> None:
    """Find or create the agent, and wait until it ends."""
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
    node = node_of(settings.node)
    place = Place(
        cluster=name or settings.name,
        node=f"{node.address}:{socket}",
        ray_node=node.id,
        host=node.address,
        store_nbytes=node.store_nbytes,
        socket=socket,
        mover=settings.mover,
        facts=installed_versions(),  # this process's environment is the broker's
    )
    # Ray hides GPUs from actors that reserve none; the token proves to the broker that it started the joiner.
    environ = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"), "SHARED_TENSOR_SOURCE_TOKEN": source_token()}
    # Only an actor with this option can receive tensors by Ray's transports; it imports torch.
    options = {"enable_tensor_transport": True} if place.mover == "nixl" else {}
    agent = find_or_create(NodeAgent, actor_name(place.cluster, "agent", place.node), node.id, place, environ, **options)
    found = ray.get(agent.state.remote())
    if found.place.ray_node != node.id:
        raise ClusterError(
            f"the broker at {socket} has an agent on Ray node {found.place.ray_node}, and this joiner is one of Ray node "
            f"{node.id}: two nodes of a machine need a broker each, at base paths of their own (SHARED_TENSOR_BASE_PATH)"
        )
    _print(f"{found.broker} is part of cluster {place.cluster!r} as {place.node}, by an agent on Ray node {node.id}")
    # Without retries, because a driver whose Ray cluster has ended would wait forever, even if another one is started.
    ended = agent.hold.options(max_task_retries=0).remote()
    _print(f"the agent has ended: {ray.get(ended)}")


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
            time.sleep(_PAUSE)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
