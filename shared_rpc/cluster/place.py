"""The place of an agent: its node, its broker, and what it has in common with other nodes."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import msgspec

from shared_rpc.errors import ConfigurationError

__all__ = ["FACTS", "AgentPlace", "facts_here"]

#: Facts that nodes must have in common to use each other's records, beside the endpoint and the kind of device.
FACTS = ("device", "python", "torch", "shared_rpc")


class AgentPlace(msgspec.Struct, frozen=True):
    """Everything that an agent is told by who creates it.

    :param node: the node's name in the cluster; nobody else has it.
    :param host: equal for nodes between which bytes need no network.
    :param ray_node: the id of the Ray node that the agent runs on.
    :param socket: that of the broker.
    :param store_nbytes: the size of the Ray node's object store.
    :param mover: see :func:`shared_rpc.cluster.agreement.movers_of`.
    :param gpus: the GPUs that the broker sees, as in :class:`~shared_rpc.settings.ClusterSettings`: Ray hides them from actors
        that reserve none.
    :param token: proves to the broker that it started the joiner, see :func:`~shared_rpc.settings.source_token`.
    :param facts: those of :data:`FACTS`; without ``device`` the broker's own device is looked at.
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


def facts_here(changes: list[str]) -> dict[str, str]:
    """Return the facts of this process's environment, which is the broker's too.

    :param changes: ``name=value``, in place of what is found.
    :raises ConfigurationError: for another form, or another name.
    """
    facts = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package, name in (("torch", "torch"), ("shared-rpc", "shared_rpc")):
        try:
            facts[name] = version(package)
        except PackageNotFoundError:
            facts[name] = ""
    for text in changes:
        name, equals, value = text.partition("=")
        if not equals or name not in FACTS:
            raise ConfigurationError(f"--fact {text!r}: use name=value, the name one of {', '.join(FACTS)}")
        facts[name] = value
    return facts
