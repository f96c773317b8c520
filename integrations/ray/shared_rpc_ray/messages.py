"""Data that the directory and the agents send to each other. Errors of this library travel as they are."""

from __future__ import annotations

from typing import Any

import msgspec

#: Facts that nodes must have in common to use each other's records, apart from the endpoint's code.
FACTS = ("device", "python", "torch", "shared_rpc")


class Group(msgspec.Struct, frozen=True, order=True):
    """Facts that nodes must have in common to use each other's records of an endpoint.

    ``fingerprint`` is that of the endpoint's definition, ``device`` a kind: ``"cpu"`` or the GPU's model, ``python`` the
    version without its last number, ``torch`` and ``shared_rpc`` the whole versions.
    """

    fingerprint: str
    device: str
    python: str
    torch: str
    shared_rpc: str


class Key(msgspec.Struct, frozen=True, order=True):
    """A call, and the group of nodes that builds it once."""

    endpoint: str
    cache_key: str
    group: Group


class Version(msgspec.Struct, frozen=True, order=True):
    """A build of a key: a number that grows, 0 for a build that no directory ordered, and the id of the object that was built.

    The origin distinguishes two builds of one number, which are possible if the directory was restarted while nodes were away.
    """

    number: int
    origin: str


class Held(msgspec.Struct, frozen=True):
    """A version that is current in a node's broker, as which object."""

    version: Version
    object_id: str
    nbytes: int


class Statement(msgspec.Struct, frozen=True):
    """Everything that a directory needs to know of a node: its facts, what it holds, and which builds run there.

    ``host`` is equal for nodes between which bytes need no network. ``broker`` names the broker's socket and pid.
    """

    node: str
    host: str
    broker: str
    facts: dict[str, str]
    held: dict[Key, Held]
    builds: tuple[Key, ...]


class Receive(msgspec.Struct, frozen=True):
    """Order to receive a version from another node's agent, as a candidate or as the current object.

    ``again`` if an earlier attempt failed: the source is to put into the store again what it has put there.
    """

    key: Key
    version: Version
    nbytes: int
    source: str
    agent: Any
    candidate: bool
    again: bool


class Change(msgspec.Struct, frozen=True):
    """Outcome of a refresh or an invalidation of one call, for nodes of one kind.

    ``kind`` are the device and the versions that the nodes have in common; a call is built for each kind by itself.
    ``version`` is the cluster's number of what is current now, None after an invalidation. It was done on ``nodes``;
    ``left_out`` has the other nodes that had the object, with the reason for each: they get the current version, or drop
    theirs, as soon as they can. ``error`` is why nothing has changed, None otherwise.
    """

    endpoint: str
    cache_key: str
    kind: dict[str, str]
    version: int | None
    nodes: tuple[str, ...]
    left_out: dict[str, str]
    error: Exception | None = None


class RayNode(msgspec.Struct, frozen=True):
    """A node of the Ray cluster that is alive; ``store_nbytes`` is the size of its object store."""

    id: str
    address: str
    store_nbytes: int


class AgentPlace(msgspec.Struct, frozen=True):
    """Parameters of an agent.

    :param node: the node's unique name in the cluster.
    :param ray_node: that on which the agent runs.
    :param socket: that of the broker.
    :param mover: one of :data:`shared_rpc_ray.membership.MOVERS`.
    :param gpus: the GPUs that the broker sees: Ray hides them from actors that reserve none.
    :param token: proves to the broker that it started the joiner.
    :param facts: those of :data:`FACTS`, apart from the broker's device.
    """

    cluster: str
    node: str
    ray_node: RayNode
    socket: str
    mover: str
    gpus: str | None
    token: str
    facts: dict[str, str]


class Lost(Exception):
    """An actor, or the broker beside it, was lost while it did something for another one."""


class SourceFailed(Exception):
    """A source could not send a version, or what arrived was damaged: another attempt may succeed."""
