"""Data that the directory and the agents send to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shared_rpc.errors import ClusterError, RemoteError, SharedRPCError, from_wire, to_wire

__all__ = [
    "FACTS",
    "AgentPlace",
    "Failed",
    "Group",
    "Holding",
    "Key",
    "KeyResult",
    "Lost",
    "Receive",
    "SourceFailed",
    "Statement",
    "Version",
    "packed",
    "unpacked",
]

#: Facts that nodes must have in common to use each other's records, apart from the endpoint's code.
FACTS = ("device", "python", "torch", "shared_rpc")


class _Plain(msgspec.Struct, frozen=True):
    """Base of the messages."""


class Group(_Plain, frozen=True, order=True):
    """Facts that nodes must have in common to use each other's records of an endpoint.

    ``fingerprint`` is that of the endpoint's definition, ``device`` a kind: ``"cpu"`` or the GPU's model, ``python`` the
    version without its last number, ``torch`` and ``shared_rpc`` the whole versions.
    """

    fingerprint: str
    device: str
    python: str
    torch: str
    shared_rpc: str


class Key(_Plain, frozen=True, order=True):
    """A call, and the group of nodes that builds it once."""

    endpoint: str
    cache_key: str
    group: Group


class Version(_Plain, frozen=True, order=True):
    """A build of a key: a number that grows, 0 for a build that no directory ordered, and the id of the object that was built.

    The origin distinguishes two builds of one number, which are possible if the directory was restarted while nodes were away.
    """

    number: int
    origin: str


class Holding(_Plain, frozen=True):
    """A version that is current in a node's broker."""

    key: Key
    version: Version
    nbytes: int


class Statement(_Plain, frozen=True):
    """Everything that a directory needs to know of a node: its facts, what it holds, and which builds run there.

    ``host`` is equal for nodes between which bytes need no network. ``broker`` names the broker's socket and pid.
    """

    node: str
    host: str
    broker: str
    facts: dict[str, str]
    holdings: tuple[Holding, ...] = ()
    builds: tuple[Key, ...] = ()


class Receive(_Plain, frozen=True):
    """Order to receive a version from another node's agent, as a candidate or as the current object."""

    key: Key
    version: Version
    nbytes: int
    source: str
    agent: Any
    candidate: bool = False


class KeyResult(_Plain, frozen=True):
    """Outcome of a refresh or an invalidation for one key.

    :param version: the current one; None after an invalidation, or where the request failed.
    :param nodes: those where it was done; ``left_out`` has the others, with the reason for each.
    :param error: why it failed, ``""`` if it did not; ``payload`` is the exception, see :func:`packed`.
    """

    key: Key
    version: Version | None
    nodes: tuple[str, ...]
    left_out: Mapping[str, str]
    error: str = ""
    payload: bytes = b""


class AgentPlace(_Plain, frozen=True):
    """Parameters of an agent.

    :param node: the node's unique name in the cluster.
    :param host: see :class:`Statement`.
    :param ray_node: the id of the Ray node that the agent runs on.
    :param socket: that of the broker.
    :param store_nbytes: the size of the Ray node's object store.
    :param mover: one of :data:`shared_rpc_ray.settings.MOVERS`.
    :param gpus: the GPUs that the broker sees: Ray hides them from actors that reserve none.
    :param token: proves to the broker that it started the joiner.
    :param facts: those of :data:`FACTS`; without ``device``, the broker's own device counts.
    """

    cluster: str
    node: str
    host: str
    ray_node: str
    socket: str
    store_nbytes: int
    mover: str
    gpus: str | None
    token: str
    facts: dict[str, str]


class Lost(Exception):
    """A node, or its broker, was lost while it did something for the directory."""


class Failed(Exception):
    """Failure of an order at a node, with the exception in packed form; ``endpoint`` if the endpoint raised it."""

    def __init__(self, text: str, payload: bytes = b"", endpoint: bool = False) -> None:
        super().__init__(text, payload, endpoint)
        self.payload = payload
        self.endpoint = endpoint

    def __str__(self) -> str:
        return str(self.args[0])


class SourceFailed(Exception):
    """A source could not send a version, or what arrived was damaged: another attempt may succeed."""


def packed(error: SharedRPCError) -> bytes:
    """Return an error as it travels to the callers at other nodes: only they unpickle an endpoint's own exception."""
    return msgspec.msgpack.encode((*to_wire(error), getattr(error, "pickled", b"")))


def unpacked(payload: bytes, text: str) -> SharedRPCError:
    """Return the error of :func:`packed`; of a text alone a :class:`ClusterError`."""
    if not payload:
        return ClusterError(text, reason="failed")
    code, message, detail, pickled = msgspec.msgpack.decode(payload, type=tuple[str, str, dict[str, str], bytes])
    error = from_wire(code, message, detail)
    if isinstance(error, RemoteError):
        error.pickled = pickled
    return error
