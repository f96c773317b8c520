"""The user's interface of a cluster: refreshes and invalidations on every node, and the cluster's status.

The directory does the work, and an agent computes the key of a call, so the user's process does not need the app.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from shared_rpc.client.replies import raise_error
from shared_rpc.errors import ClusterError, DeadlineExceeded, RemoteError, to_wire
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.values import DtypeRef, encode_call, lower_call, refuse
from shared_rpc_ray.membership import actor_name, cluster_settings, connect, find, reason_of
from shared_rpc_ray.messages import Call, Change, Lost

#: Timeout for the directory's status, in seconds: the directory may be restarting.
_PATIENCE = 10.0


class Cluster:
    """The nodes whose brokers were started with ``--cluster``, for any process on a node of the Ray cluster.

    An existing connection of the process to Ray is used; otherwise a new one, which :meth:`close` ends.

    :param name: None for ``SHARED_TENSOR_CLUSTER``, or ``"default"``.
    :param address: of Ray; None for ``RAY_ADDRESS``, or the Ray cluster of this machine.
    :param timeout: seconds for a request, None for no limit.
    :raises ClusterError: if Ray does not answer.
    """

    def __init__(self, name: str | None = None, *, address: str | None = None, timeout: float | None = 600.0) -> None:
        settings = cluster_settings()
        self.name = settings.name if name is None else name
        self._timeout = timeout
        self._connected = not ray.is_initialized()
        if self._connected:
            connect(settings.address if address is None else address)

    def close(self) -> None:
        """Close the connection to Ray, if it was created here."""
        if self._connected:
            self._connected = False
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        """Return nodes and objects of the cluster, as plain data.

        ``nodes`` has for each node its broker, device and versions, and its latest
        :class:`~shared_rpc.protocol.infos.ClusterStatus`, at most 2 s old. ``keys`` has for each call its
        current ``version``, the ``nodes`` that have the object with the version of each, the nodes that are ``building`` and
        ``waiting``, and those ``left_out``, with the reasons.

        :raises ClusterError: at once for a cluster without nodes, and if its directory does not answer in 10 s.
        """
        try:
            return cast("dict[str, Any]", _got(self._directory().status.remote(), _PATIENCE))
        except (Lost, DeadlineExceeded) as error:
            raise ClusterError(f"the directory of cluster {self.name!r} does not answer: {error}") from error

    def refresh(self, endpoint: str, /, *args: Any, **kwargs: Any) -> list[Change]:
        """Build a new version of a cached object once, send it to every node that has the object, and make it current there.

        Calls return the old version until all nodes have received the new one or failed; then all switch, in milliseconds. A
        node that fails, or takes too long, is left out and reported. If no node has the object, one builds it.

        Nodes of another kind, such as with another device, build separately: there is one outcome per kind of node, with the
        kind of the contacted node first. If only some kinds have a new version, the changes of the others have an ``error``.

        :raises EndpointNotFound: if no node has such an endpoint.
        :raises ConfigurationError: if the call is not managed and cached.
        :raises ClusterError: if no node could build it, and for a cluster without nodes. An exception of the endpoint is
            raised with its own type.
        """
        return self._changes("refresh", endpoint, _encoded(args, kwargs))

    def invalidate(self, endpoint: str, /, *args: Any, **kwargs: Any) -> list[Change]:
        """Drop the object of a call on every node. Handles stay valid, and the next call on any node rebuilds it."""
        return self._changes("invalidate", endpoint, _encoded(args, kwargs))

    def invalidate_endpoint(self, endpoint: str) -> list[Change]:
        """Drop all objects of an endpoint on every node: see :meth:`invalidate`."""
        return self._changes("invalidate", endpoint, None)

    def _changes(self, method: str, endpoint: str, call: Call | None) -> list[Change]:
        """Execute a change in the directory; raise the error if it failed for all kinds of nodes."""
        host = ray.util.get_node_ip_address()
        try:
            changes: list[Change] = _got(getattr(self._directory(), method).remote(host, endpoint, call), self._timeout)
        except Lost as error:
            raise ClusterError(
                f"the directory was lost before it answered; 'shared-rpc cluster status' shows the current versions: {error}"
            ) from error
        if changes and all(change.error is not None for change in changes):
            why = changes[0].error
            if isinstance(why, RemoteError):  # raised with its own type, if that can be rebuilt
                raise_error(m.Error(*to_wire(why), endpoint_raised=bool(why.pickled)), Frame(0, 0, b"", why.pickled))
            raise ClusterError(f"{changes[0].cache_key} has no new version: {why}") from why
        return changes

    def _directory(self) -> Any:
        """Return the directory, which the first node created.

        :raises ClusterError: if there is none.
        """
        try:
            return find(actor_name(self.name, "directory"))
        except ClusterError as error:
            raise ClusterError(
                f"cluster {self.name!r} has no nodes: start brokers with 'shared-rpc serve app.py --cluster "
                f"{self.name}', or select another cluster (SHARED_TENSOR_CLUSTER)"
            ) from error


def _got(reference: Any, timeout: float | None) -> Any:
    """Return the result of an actor's method, or raise the exception of the method.

    :raises Lost: if the actor is permanently lost. Ray repeats the call if it restarts the actor.
    """
    try:
        return ray.get(reference, timeout=timeout)
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"the cluster did not answer in {timeout:g} s; its work continues") from error
    except RayError as error:
        raise reason_of(error) from None


def _encoded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the encoded arguments of a call."""
    positional, named = encode_call(*lower_call(args, kwargs, _leaf))
    return bytes(positional), bytes(named)


def _leaf(value: Any, path: str) -> DtypeRef:
    if f"{type(value).__module__}.{type(value).__qualname__}" == "torch.dtype":
        return DtypeRef(str(value).removeprefix("torch."))
    refuse(value, path)
