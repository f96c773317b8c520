"""A listening socket and its connections."""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import NamedTuple

import anyio
import anyio.lowlevel

from shared_rpc.errors import ConfigurationError, ServerBusy
from shared_rpc.forks import after_fork
from shared_rpc.protocol.peers import is_own, named, peer_of
from shared_rpc.server.core import Core
from shared_rpc.server.listener import bind_socket, remove_socket
from shared_rpc.server.remote import RemoteClient

_log = logging.getLogger("shared_rpc.server")


#: Seconds before the next attempt to accept a connection.
_PAUSE = 0.05


class Usage(NamedTuple):
    """Counts of a server's users: clients, their leases, tasks that have not ended, and runs."""

    clients: int
    leases: int
    tasks: int
    running: int


class Acceptor:
    """Listens at ``path`` from construction on, and serves clients while :meth:`serve` runs.

    :param listener: a socket already listening there, whose file another process removes.
    :raises ConfigurationError: if the socket is not available; names the pid of a live server.
    """

    def __init__(
        self,
        core: Core,
        path: str,
        max_connections: int,
        listener: socket.socket | None = None,
    ) -> None:
        self.path = path
        self._core = core
        self._max_connections = max_connections
        self._connections: set[RemoteClient] = set()
        #: Number of connections admitted so far.
        self.admitted = 0
        self._removing = threading.Lock()
        self._removed = listener is not None
        self._listener = listener or bind_socket(path)
        self._inode = os.lstat(path).st_ino if listener is None else 0
        after_fork(self._abandon)

    def usage(self, asker: str = "") -> Usage:
        """Count the server's users and their uses, without those of :meth:`Core.apart`. On the loop only.

        :param asker: the session of the asking client, excluded from the count.
        """
        leases, apart = self._core.leases, self._core.apart(asker)
        tasks = self._core.tasks.table.counts()
        return Usage(
            clients=len(self._core.sessions.ids - apart),
            leases=len(leases) - sum(len(leases.of_session(session)) for session in apart),
            tasks=tasks["pending"] + tasks["running"],
            running=len(self._core.state.runs),
        )

    async def serve(self) -> None:
        """Accept until cancelled; then stop the core, so that waiters get the reason, and end the connections."""
        try:
            await self._accept()
        finally:
            self._core.stop()
            for connection in tuple(self._connections):
                connection.close()

    async def _accept(self) -> None:
        with self._listener:
            while True:
                # Connected clients get their turn, however many others connect.
                await anyio.lowlevel.checkpoint()
                try:
                    await self._accept_one()
                except Exception:
                    _log.exception("cannot accept a connection")
                    await anyio.sleep(_PAUSE)

    async def _accept_one(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            await anyio.wait_readable(self._listener)
            return
        except OSError as error:
            # No descriptor is free, or the client hung up at once. Neither may end the server.
            _log.error("cannot accept a connection: %s", error)
            await anyio.sleep(_PAUSE)
            return
        try:
            self._admit(sock)
        except BaseException:
            sock.close()
            raise

    def _admit(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        scarce = self._core.objects.descriptors.are_scarce(sock.fileno())
        connection = RemoteClient(sock, peer, self._core, self._connections.discard)
        if not is_own(peer.uid):
            _log.warning("refused the connection of pid %d of %s", peer.pid, named(peer.uid))
            connection.refuse(
                ConfigurationError(
                    f"the server (pid {os.getpid()}) of uid {os.geteuid()} accepts only its own user, and this process is of "
                    f"{named(peer.uid)}: run both as one user"
                )
            )
        elif len(self._connections) >= self._max_connections:
            text = f"the server (pid {os.getpid()}) has all its {self._max_connections} connections (max_connections)"
            connection.refuse(ServerBusy(text))
        elif scarce and self._connections:
            connection.refuse(
                ServerBusy(
                    f"the server (pid {os.getpid()}) has nearly all of its {self._core.objects.descriptors.available()} file "
                    f"descriptors open, for {len(self._connections)} connections and {len(self._core.objects)} objects"
                )
            )
        else:
            self.admitted += 1
            self._connections.add(connection)
            try:
                connection.start()
            except OSError as error:  # the limit of watched descriptors (epoll) is reached
                _log.error("cannot serve pid %d: %s", peer.pid, error)
                connection.close()

    def remove_socket(self) -> None:
        """Remove the socket's file: only once, and while it still listens, because the next server's file may get the same path
        and the same inode number.
        """
        with self._removing:
            if not self._removed:
                self._removed = True
                remove_socket(self.path, self._inode)

    def inherited(self) -> socket.socket | None:
        """Return a duplicate of an inherited listening socket for the next server; None if this server created its own.

        :raises OSError: if no descriptor is free.
        """
        return self._listener.dup() if self._inode == 0 else None

    def close(self) -> None:
        """Discard a socket that never served."""
        self.remove_socket()
        self._listener.close()

    def _abandon(self) -> None:
        # A child's copy of the listening socket would make a dead server seem to run.
        self._listener.close()
        for connection in self._connections:
            connection.stream.abandon()
