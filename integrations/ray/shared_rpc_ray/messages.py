"""Data that the directory and the agents send to each other. Errors of this library travel as they are."""

from __future__ import annotations

import msgspec

from shared_rpc.errors import ClusterError

#: Facts that nodes must have in common to use each other's records, apart from the endpoint's code.
FACTS = ("device", "python", "torch", "shared_rpc")


#: The arguments of a call, as they travel.
Call = tuple[bytes, bytes]


class Group(msgspec.Struct, frozen=True, order=True):
    """Facts that nodes must have in common to use each other's records of an endpoint.

    ``fingerprint`` is that of the endpoint's definition, ``device`` a kind: ``"cpu"`` or the GPU's model, ``python`` the
    version without its last number, ``torch`` and ``shared_rpc`` the public versions.
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
    """A build of a key: a number that grows, 0 for a build that no directory ordered, and the id and size of the built object.

    The origin distinguishes two builds of one number, which are possible if the directory was restarted while nodes were away.
    """

    number: int
    origin: str
    nbytes: int


class Held(msgspec.Struct, frozen=True):
    """A version that is current in a node's broker, as which object."""

    version: Version
    object_id: str


class Place(msgspec.Struct, frozen=True):
    """A broker's place in the cluster.

    :param node: the broker's unique name in the cluster.
    :param ray_node: the id of the Ray node that the agent runs on.
    :param host: its address: bytes between nodes of one host need no network.
    :param store_nbytes: the size of its object store.
    :param socket: that of the broker.
    :param mover: one of :data:`shared_rpc_ray.membership.MOVERS`.
    :param facts: those of :data:`FACTS`; the agent adds the broker's device.
    """

    cluster: str
    node: str
    ray_node: str
    host: str
    store_nbytes: int
    socket: str
    mover: str
    facts: dict[str, str]


class Statement(msgspec.Struct, frozen=True):
    """Everything that a directory needs to know of a node: its place, what it holds, and which builds run there.

    ``broker`` names the broker's socket and pid.
    """

    place: Place
    broker: str
    held: dict[Key, Held]
    builds: tuple[Key, ...]


class Transfer(msgspec.Struct, frozen=True):
    """The way of a version from a ``source`` to another node: the size of its parts, and what carries them.

    ``again`` if an earlier attempt failed: the source is to put into the store again what it has put there.
    """

    source: str
    part_nbytes: int
    mover: str
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


class Lost(ClusterError):
    """An actor, or the broker of an agent, was lost while it did something for another actor."""


class SourceFailed(ClusterError):
    """A source could not send a version, or what arrived was damaged: another attempt may succeed."""
