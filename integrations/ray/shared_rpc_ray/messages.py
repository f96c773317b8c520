"""Data exchanged by the directory and the agents. Errors of this library are sent unchanged."""

from __future__ import annotations

import msgspec

from shared_rpc.errors import ClusterError

#: Facts that nodes must have in common to use each other's records, apart from the endpoint's code.
FACTS = ("device", "python", "torch", "shared_rpc")


#: The encoded arguments of a call.
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
    """A call, and a group of nodes that share one build of it."""

    endpoint: str
    cache_key: str
    group: Group


class Version(msgspec.Struct, frozen=True, order=True):
    """A build of a key: an increasing number, 0 for a build without the directory, and the id and size of the built object.

    The origin distinguishes builds of the same number, which are possible if the directory was restarted while nodes were
    unreachable.
    """

    number: int
    origin: str
    nbytes: int


class Held(msgspec.Struct, frozen=True):
    """A version that is current in a node's broker, and the id of its object there."""

    version: Version
    object_id: str


class Place(msgspec.Struct, frozen=True):
    """A broker's place in the cluster.

    :param node: the broker's unique name in the cluster.
    :param ray_node: the id of the agent's Ray node.
    :param host: its address; transfers within one host need no network.
    :param store_nbytes: the size of its object store.
    :param socket: of the broker.
    :param mover: one of :data:`shared_rpc_ray.membership.MOVERS`.
    :param facts: see :data:`FACTS`; the agent adds the broker's device.
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
    """The state of a node for the directory: its place, held objects, and running builds.

    ``broker`` has the broker's socket and pid.
    """

    place: Place
    broker: str
    held: dict[Key, Held]
    builds: tuple[Key, ...]


class Transfer(msgspec.Struct, frozen=True):
    """The transfer of a version from a ``source`` to another node: the size of its parts, and the transport.

    ``again`` is True if an earlier attempt failed: the source then puts the parts into the store again.
    """

    source: str
    part_nbytes: int
    mover: str
    again: bool


class Change(msgspec.Struct, frozen=True):
    """Outcome of a refresh or an invalidation of one call, for nodes of one kind.

    ``kind`` has the device and the versions that the nodes have in common; each kind builds a call separately.
    ``version`` is the number of the version that is current now, None after an invalidation. The change was made on ``nodes``;
    ``left_out`` has the other nodes that had the object, with the reason for each: they receive the current version, or drop
    theirs, as soon as possible. ``error`` is the reason if nothing has changed, otherwise None.
    """

    endpoint: str
    cache_key: str
    kind: dict[str, str]
    version: int | None
    nodes: tuple[str, ...]
    left_out: dict[str, str]
    error: Exception | None = None


class Lost(ClusterError):
    """An actor, or the broker of an agent, was lost while it worked for another actor."""


class SourceFailed(ClusterError):
    """A source could not send a version, or the received bytes were damaged: another attempt may succeed."""
