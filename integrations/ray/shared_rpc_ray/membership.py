"""Membership of a Ray cluster: connections to Ray, and the actors of this library."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Coroutine
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shared_rpc.errors import ClusterError, ConfigurationError, SharedRPCError
from shared_rpc.settings import CLUSTER_NAME
from shared_rpc_ray.messages import Lost

_log = logging.getLogger("shared_rpc_ray")

#: Ray namespace of all actors of this library.
NAMESPACE = "shared_rpc"
#: Transports of bytes between nodes: Ray's object store, or its tensor transport over NIXL, whose actors import torch.
MOVERS = ("objects", "nixl")


class ClusterSettings(NamedTuple):
    """Settings of a server in a cluster.

    :param name: of the cluster; several can share one Ray cluster without affecting each other.
    :param address: of Ray, in Ray's own format.
    :param node: prefix of the id of this server's Ray node, if the machine has several.
    :param mover: one of :data:`MOVERS`.
    """

    name: str
    address: str
    node: str
    mover: str


def cluster_settings() -> ClusterSettings:
    """Read ``SHARED_TENSOR_CLUSTER``, ``RAY_ADDRESS``, ``SHARED_TENSOR_CLUSTER_NODE`` and ``SHARED_TENSOR_CLUSTER_MOVER``.

    :raises ConfigurationError: for a mover that does not exist.
    """
    variables = (f"SHARED_TENSOR_CLUSTER{end}" for end in ("", "_NODE", "_MOVER"))
    name, node, mover, address = (os.environ.get(name, "").strip() for name in (*variables, "RAY_ADDRESS"))
    if mover and mover not in MOVERS:
        raise ConfigurationError(f"SHARED_TENSOR_CLUSTER_MOVER={mover!r}: use {' or '.join(MOVERS)}")
    return ClusterSettings(name if CLUSTER_NAME.fullmatch(name) else "default", address, node, mover or MOVERS[0])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


async def got(reference: Awaitable[Any]) -> Any:
    """Return the result of an actor's method, or raise the exception of the method.

    :raises Lost: if the actor is permanently lost. Ray repeats the call if it restarts the actor.
    """
    try:
        return await reference
    except RayError as error:
        raise reason_of(error) from None


def reason_of(error: RayError) -> Exception:
    """Return the exception of an actor's method, or :class:`Lost` if the actor is permanently lost."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, Exception) else error
    return Lost(first_line(error))


class Tasks:
    """Background tasks of an actor. Unexpected exceptions are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SharedRPCError):
            _log.error("a background task failed", exc_info=error)


def connect(address: str) -> None:
    """Connect this process to a running Ray cluster.

    :param address: as for ``ray.init``; ``""`` for the cluster of this machine.
    :raises ClusterError: if there is none, or it cannot be joined.
    """
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    try:
        ray.init(address=address or "auto", logging_level=logging.ERROR, **options)
    except ConnectionError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address or 'this machine'}: start one with 'ray start', or set RAY_ADDRESS ({error})"
        ) from error
    except Exception as error:  # RuntimeError for other versions of Python or Ray, and errors of Ray's authentication
        raise ClusterError(f"cannot join the Ray cluster at {address or 'this machine'}: {error}") from error


class RayNode(NamedTuple):
    """A node of the Ray cluster; ``store_nbytes`` is the size of its object store."""

    id: str
    address: str
    store_nbytes: int


def alive_nodes() -> dict[str, RayNode]:
    """Return the live nodes of the cluster, by id."""
    return {
        node["NodeID"]: RayNode(
            node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("object_store_memory", 0))
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def node_of(wanted: str) -> RayNode:
    """Return the Ray node of this machine.

    :param wanted: prefix of its id; ``""`` if the machine has only one node.
    :raises ClusterError: if there is no such node, or several.
    """
    nodes = alive_nodes()
    own = nodes.get(ray.get_runtime_context().get_node_id())
    found = [
        node
        for node in nodes.values()
        if (node.id.startswith(wanted) if wanted else own is not None and node.address == own.address)
    ]
    if len(found) != 1:
        raise ClusterError(
            f"{len(found)} Ray nodes that are alive are on this machine, or begin with SHARED_TENSOR_CLUSTER_NODE={wanted!r}: "
            f"set SHARED_TENSOR_CLUSTER_NODE to the one that this server belongs to, of "
            f"{', '.join(sorted(node.id for node in found or nodes.values()))}"
        )
    return found[0]


def actor_name(cluster: str, role: str, node: str = "") -> str:
    """Return the name of an actor: ``role`` is ``"directory"`` or ``"agent"``."""
    return f"{cluster}/{role}/{node}" if node else f"{cluster}/{role}"


def named(cluster: str, role: str) -> list[str]:
    """Return the nodes of all named actors of a role."""
    begin = actor_name(cluster, role) + "/"
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(begin) for name in names if name.startswith(begin))


def find(name: str) -> Any:
    """Return an actor by its name.

    :raises ClusterError: if there is none.
    """
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ClusterError(f"the Ray cluster has no actor {name!r} (any more)") from error


def find_or_create(kind: type, name: str, node: str, *arguments: Any, soft: bool = False, **options: Any) -> Any:
    """Return the actor of a name, or create it on a node; it outlives its creator.

    Ray restarts it when its process ends, and repeats the unanswered calls. If the node is lost, the actor is lost too, or with
    ``soft`` restarted on another node.
    """
    remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=10_000, **options)(kind)
    strategy = NodeAffinitySchedulingStrategy(node, soft=soft)
    return remote.options(
        name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, scheduling_strategy=strategy
    ).remote(*arguments)
