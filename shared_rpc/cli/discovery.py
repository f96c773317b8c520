"""Discovery of the live servers of this user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared_rpc import Client
from shared_rpc.cli.rendering import complain
from shared_rpc.client.starting import listens
from shared_rpc.errors import ConfigurationError, ConnectError, SharedRPCError, TaskError
from shared_rpc.protocol.peers import is_own_or_root
from shared_rpc.settings import is_socket_of, resolve_base_path

#: Seconds for a server to answer: one that may be stopped or stuck, and one that was chosen.
PATIENCE, _TIMEOUT = 2.0, 30.0


def pass_over(reason: str) -> None:
    """Report a server that is not used."""
    complain(f"passed over: {reason}")


@contextmanager
def live_servers(base_path: str | None, report: Callable[[str], object] = pass_over) -> Iterator[list[Client]]:
    """Yield clients of all servers that answer at a socket of the base path; without one, at any in the default's directory.

    Dead sockets are silently left out.

    :param report: called for each live server that does not answer, with the reason.
    """
    whole = resolve_base_path(base_path)
    clients = []
    try:
        for path in sorted(Path(whole).parent.glob("*.sock")):
            if not _is_ours(path, whole) or (base_path and not is_socket_of(whole, str(path))):
                continue
            client = Client(socket_path=path, timeout=PATIENCE, connect_timeout=0)
            try:
                client.ping()
            except (SharedRPCError, OSError) as error:
                client.close()
                if listens(str(path)):
                    # The cause leaves out the advice to start a server.
                    reason = error.__cause__ if isinstance(error.__cause__, ConnectError) else error
                    report(str(reason))
            else:
                clients.append(client)
        yield clients
    finally:
        for client in clients:
            client.close()


def _is_ours(path: Path, base_path: str) -> bool:
    """Return True if a socket may be that of a server of this user.

    A server's lock file is next to its socket: a directory such as /run/user/1000 has sockets of other programs too. In a
    sticky directory, sockets of other users are left out, except at the path of a server of this user.
    """
    with suppress(FileNotFoundError):
        foreign = not is_own_or_root(path.lstat().st_uid)
        return is_socket_of(base_path, str(path)) if foreign else path.with_name(f"{path.name}.lock").exists()
    return False


def the_server(socket_path: str | None, base_path: str | None, preferred: str = "", timeout: float = _TIMEOUT) -> Client:
    """Return a client of the server at ``socket_path``, or of the only live server. It does not wait for a server to start.

    :param preferred: the socket to choose if several servers answer.
    :raises ConfigurationError: if there is none, or several to choose from.
    """
    if socket_path is None:
        with _some_servers(base_path) as clients:
            chosen = [client for client in clients if client.socket_path == preferred] or clients
            if len(chosen) > 1:
                raise ConfigurationError(f"several servers answer; choose one with --socket: {_paths(clients)}")
            socket_path = chosen[0].socket_path
    return Client(socket_path=socket_path, timeout=timeout, connect_timeout=0)


def the_owner(task_id: str, socket_path: str | None, base_path: str | None) -> Client:
    """Return a client of the server at ``socket_path``, or of the live server that issued the task's id.

    :raises ConfigurationError: if no server is alive.
    :raises TaskError: if none of several issued it.
    """
    if socket_path is None:
        with _some_servers(base_path) as clients:
            issuer = task_id.rpartition("-")[0]
            # If there is one server, its own error about a foreign id is more specific.
            owners = clients if len(clients) == 1 else [one for one in clients if one.get_server_info()["server_id"] == issuer]
            if not owners:
                raise TaskError(f"none of the servers that answer issued task {task_id!r}: {_paths(clients)}", reason="unknown")
            socket_path = owners[0].socket_path
    return the_server(socket_path, base_path)


@contextmanager
def _some_servers(base_path: str | None) -> Iterator[list[Client]]:
    """Yield clients of all live servers.

    :raises ConfigurationError: if none answers, with the reasons.
    """
    reasons: list[str] = []
    with live_servers(base_path, reasons.append) as clients:
        if not clients:
            whole = resolve_base_path(base_path)
            place = f"at {whole}-<tag>.sock" if base_path else f"in {Path(whole).parent}"
            advice = "start one with 'shared-rpc serve app.py', or name another place with --base-path or --socket"
            raise ConfigurationError(f"no server answers {place}: {'; '.join(reasons) or advice}")
        for reason in reasons:
            pass_over(reason)
        yield clients


def _paths(clients: list[Client]) -> str:
    return ", ".join(client.socket_path for client in clients)
