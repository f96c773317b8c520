"""Which servers of this user are alive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared_rpc import Client
from shared_rpc.errors import ConfigurationError, SharedRPCError
from shared_rpc.settings import resolve_base_path

__all__ = ["live_servers", "the_server"]

#: Seconds a server has to answer a look at it.
_PATIENCE = 2.0


@contextmanager
def live_servers(base_path: str | None) -> Iterator[list[Client]]:
    """Clients of all servers that answer at a socket in the directory of the base path."""
    directory = Path(resolve_base_path(base_path)).parent
    clients = []
    try:
        for path in sorted(directory.glob("*.sock")):
            client = Client(socket_path=path, timeout=_PATIENCE, connect_timeout=0)
            try:
                client.ping()
            except (SharedRPCError, OSError):
                client.close()
            else:
                clients.append(client)
        yield clients
    finally:
        for client in clients:
            client.close()


@contextmanager
def the_server(socket: str | None, base_path: str | None) -> Iterator[Client]:
    """A client of the server at ``socket``, or of the only one that is alive.

    :raises ConfigurationError: if there are none or several to choose from.
    """
    if socket is not None:
        with Client(socket_path=socket, timeout=30.0, connect_timeout=0) as client:
            yield client
        return
    with live_servers(base_path) as clients:
        if not clients:
            raise ConfigurationError(
                f"no server answers in {Path(resolve_base_path(base_path)).parent}: start one with 'shared-rpc serve app.py', "
                f"or name another place with --base-path or --socket"
            )
        if len(clients) > 1:
            paths = ", ".join(client.socket_path for client in clients)
            raise ConfigurationError(f"several servers answer; choose one with --socket: {paths}")
        yield clients[0]
