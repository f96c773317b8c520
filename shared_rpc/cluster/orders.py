"""Vocabulary between the directory of a cluster and the agents of its nodes: events go in, decisions come out.

A *node* is a broker with its agent, by a name that nobody else has; a host with two brokers has two nodes. Nodes of one
*group* can use each other's records; a *key* is a call together with a group. All is plain data.

::

    agent ── NodeJoined, Missed, Advanced, Built, Done, OrderFailed, Dropped, … ──► directory
    agent ◄── orders: Build, Fetch, ChangeOver, … ──────────────────────────── directory
          ◄── notices: Abandon, FailMisses, Answer, Rejoin ───────────────────────

Obligations of an agent:

- Each **order** is answered once, by an event that carries the order itself: :class:`Built` for :class:`Build` and
  :class:`BuildCandidate`, :class:`Done` for the others, :class:`OrderFailed` for any. While orders are in progress, the
  agent sends :class:`Advanced` every ``report_every`` seconds; a node that is silent about an order for ``silence``
  seconds loses it.
- A :class:`Fetch` replaces an earlier one of the same key and version: the parts that have arrived are kept, and the
  rest comes from the new source. The order that was replaced is not answered.
- Once an object is current at a node, by :class:`Build`, :class:`ChangeOver`, or a :class:`Fetch` that is no
  candidate, it answers every miss that the node has reported for the key and that is not answered yet.
- Versions are told apart by their digests. With ``relay``, the agent of the source is asked for parts that have not
  arrived there, and answers when they have.
- Orders and notices of one node are carried out in the order in which they were sent, and so are its events.
- An agent that starts, or that is asked by :class:`Rejoin`, or that finds that the directory was restarted, sends
  :class:`NodeJoined` with all that its node holds, misses, and carries out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

__all__ = [
    "Abandon",
    "Advanced",
    "Answer",
    "Blame",
    "Build",
    "BuildCandidate",
    "Built",
    "ChangeOver",
    "ClusterEvent",
    "Decision",
    "Done",
    "Dropped",
    "FailMisses",
    "Fetch",
    "Group",
    "Holding",
    "Invalidate",
    "InvalidationRequested",
    "Key",
    "KeyResult",
    "MissWithdrawn",
    "Missed",
    "NodeFacts",
    "NodeJoined",
    "NodeLeft",
    "Order",
    "OrderFailed",
    "RefreshRequested",
    "Rejoin",
    "Version",
]


class _Plain(msgspec.Struct, frozen=True, gc=False):
    """Base of what is sent."""


class Group(_Plain, frozen=True, order=True):
    """Facts that nodes must have in common to use each other's records of an endpoint.

    ``fingerprint`` is of the endpoint's definition, ``device`` a kind: ``"cpu"`` or the GPU's model, ``python`` the version
    without its last number, ``torch`` and ``shared_rpc`` the whole versions.
    """

    fingerprint: str
    device: str
    python: str
    torch: str
    shared_rpc: str


class Key(_Plain, frozen=True, order=True):
    """A call and the group that builds it once. The cluster's name is no part of it: a directory has one cluster."""

    endpoint: str
    cache_key: str
    group: Group


class Version(_Plain, frozen=True, order=True):
    """A build of a key: a number that grows, and the digest of what was built.

    The digest tells two builds of one number apart, which can only be if the directory was restarted while nodes were away.
    An agent that knows a record's digest alone says 0 for the number.
    """

    number: int
    digest: str


class NodeFacts(_Plain, frozen=True):
    """Facts about a node: for the choice of sources, and for people.

    ``host`` is equal for nodes between which bytes need no network. ``broker`` says where the broker is: its socket, its pid.
    """

    host: str
    device: str = ""
    python: str = ""
    torch: str = ""
    shared_rpc: str = ""
    broker: str = ""


class Holding(_Plain, frozen=True):
    """A version that a node has: as its current object, or as a candidate."""

    key: Key
    version: Version
    nbytes: int
    candidate: bool = False


class Blame(enum.Enum):
    """Cause of a failed order, which says what comes next.

    ``ENDPOINT``: the endpoint raised; all who wait get the error, the next call tries anew.
    ``NODE``: this node alone cannot, its quota is exceeded, its store is full, its worker crashed; it is left out and named.
    ``SOURCE``: the source had not the bytes, or they did not fit their digest; another source is tried.
    ``RELAY``: the source was receiving the bytes itself, and gave that up; another source is tried, and it is not blamed here.
    """

    ENDPOINT = "endpoint"
    NODE = "node"
    SOURCE = "source"
    RELAY = "relay"


# Orders, each of which is answered.


class _Order(_Plain, frozen=True, tag=True):
    """Base of orders. ``id`` is unique, for one start of the directory."""

    node: str
    key: Key
    id: int


class Build(_Order, frozen=True):
    """Build the object for the misses that wait at this node: their run goes to the executor."""

    number: int


class BuildCandidate(_Order, frozen=True):
    """Build a candidate, which does not become current. ``payload`` is that of the request: the call's arguments."""

    number: int
    payload: bytes


class Fetch(_Order, frozen=True):
    """Transfer: get the record's bytes from a node that has them.

    With ``candidate`` it is kept beside the current object until :class:`ChangeOver`; without, it answers misses at once.
    With ``relay`` the source is itself receiving the bytes, and serves each part as it arrives.
    """

    version: Version
    nbytes: int
    source: str
    candidate: bool = False
    relay: bool = False


class ChangeOver(_Order, frozen=True):
    """Change-over: make the candidate of that version the current object."""

    version: Version


class Invalidate(_Order, frozen=True):
    """Invalidate the call in the broker, and give up whatever is being received of it."""


Order = Build | BuildCandidate | Fetch | ChangeOver | Invalidate

# Notices, which are not answered.


class Abandon(_Plain, frozen=True, tag=True):
    """End of a version at a node: give up what is being received, or that is a candidate. Nothing happens if there is none."""

    node: str
    key: Key
    version: Version


class FailMisses(_Plain, frozen=True, tag=True):
    """Answer the misses of a key at this node with an error. ``payload`` is the exception, where the endpoint raised it."""

    node: str
    key: Key
    error: str
    payload: bytes = b""


class KeyResult(_Plain, frozen=True):
    """Outcome of a request for one key.

    :param version: what is current now; None after an invalidation, or where the request failed.
    :param nodes: the nodes where it was done.
    :param left_out: the other nodes, with the reason for each.
    :param error: why it failed, ``""`` if it did not; ``payload`` is the exception, where the endpoint raised it.
    """

    key: Key
    version: Version | None
    nodes: tuple[str, ...]
    left_out: Mapping[str, str]
    error: str = ""
    payload: bytes = b""


class Answer(_Plain, frozen=True, tag=True):
    """Answer to a request of this node, once all its keys are settled. Without results nobody has the call."""

    node: str
    request: str
    results: tuple[KeyResult, ...]


class Rejoin(_Plain, frozen=True, tag=True):
    """Send :class:`NodeJoined`: this directory does not know the node."""

    node: str


Decision = Order | Abandon | FailMisses | Answer | Rejoin

# Events.


class NodeJoined(_Plain, frozen=True, tag=True):
    """Complete statement of a node: at its start, and whenever its agent or the directory was restarted.

    :param misses: keys of misses that are not answered.
    :param orders: orders that are being carried out.
    """

    node: str
    facts: NodeFacts
    holdings: tuple[Holding, ...] = ()
    misses: tuple[Key, ...] = ()
    orders: tuple[Order, ...] = ()


class NodeLeft(_Plain, frozen=True, tag=True):
    """Loss of a node, of its broker, or of its agent for good."""

    node: str
    reason: str = "it was lost"


class Missed(_Plain, frozen=True, tag=True):
    """Call at a node of what it does not hold. Again for a key that is waited for already, it changes nothing."""

    node: str
    key: Key


class MissWithdrawn(_Plain, frozen=True, tag=True):
    """End of the wait for a key at a node: all its callers have given up. What is under way goes on."""

    node: str
    key: Key


class Built(_Plain, frozen=True, tag=True):
    """Answer to :class:`Build` and :class:`BuildCandidate`."""

    order: Build | BuildCandidate
    digest: str
    nbytes: int

    @property
    def node(self) -> str:
        """The node that reports it."""
        return self.order.node


class Done(_Plain, frozen=True, tag=True):
    """Answer to :class:`Fetch`, :class:`ChangeOver` and :class:`Invalidate`.

    ``movers`` says for a transfer how many bytes came by which mover.
    """

    order: Fetch | ChangeOver | Invalidate
    movers: Mapping[str, int] = {}

    @property
    def node(self) -> str:
        """The node that reports it."""
        return self.order.node


class OrderFailed(_Plain, frozen=True, tag=True):
    """Answer to an order that could not be carried out."""

    order: Order
    error: str
    blame: Blame
    payload: bytes = b""

    @property
    def node(self) -> str:
        """The node that reports it."""
        return self.order.node


class Advanced(_Plain, frozen=True, tag=True):
    """Sign of life of a node that carries out orders: for each order's id the bytes that have arrived, 0 for builds."""

    node: str
    nbytes: Mapping[int, int]


class Dropped(_Plain, frozen=True, tag=True):
    """End of a version at a node that nobody ordered: it was evicted, or invalidated at that node alone."""

    node: str
    key: Key
    version: Version


class RefreshRequested(_Plain, frozen=True, tag=True):
    """Request for a new version of a call, in every group that has it. The :class:`Answer` goes to ``node``.

    ``request`` is an id of the asker's choice; asking again with the id of a request that is not answered yet joins that.
    ``payload`` goes to the builder.
    """

    node: str
    request: str
    endpoint: str
    cache_key: str
    payload: bytes = b""
    #: Where the call goes if no node has it: the asker builds it for its own group.
    key: Key | None = None


class InvalidationRequested(_Plain, frozen=True, tag=True):
    """Request to invalidate a call, or an endpoint's calls (without ``cache_key``), everywhere. Answered as a refresh is."""

    node: str
    request: str
    endpoint: str
    cache_key: str | None = None


ClusterEvent = (
    NodeJoined
    | NodeLeft
    | Missed
    | MissWithdrawn
    | Built
    | Done
    | OrderFailed
    | Advanced
    | Dropped
    | RefreshRequested
    | InvalidationRequested
)
