"""Sessions of connected processes, and their ends.

A session holds the leases of one client. It begins with the handshake of its connection, and ends with the connection, for any
reason: then all its leases are released.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import get_args

from shared_rpc.errors import CapabilityError, ConfigurationError
from shared_rpc.observability.events import HOOKS, SessionClosed, SessionOpened
from shared_rpc.protocol.infos import HolderInfo, SessionInfo
from shared_rpc.protocol.options import ClientCode
from shared_rpc.protocol.peers import Peer, shares_pid_namespace
from shared_rpc.server.state.leases import Holder, LeaseTable
from shared_rpc.server.state.objects import ObjectStore, infos_of, usage_of


@dataclass(eq=False)
class Session:
    """One client; for ``may_send_code`` see :meth:`Sessions.check_code`."""

    peer: Peer
    may_send_code: bool
    session_id: str = field(default_factory=lambda: secrets.token_hex(8))
    since: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    #: True once the client has announced the session's end.
    closing: bool = False


class Sessions:
    """All sessions of a server.

    :param server_id: the server's id, for events.
    :param on_end: called when a session has ended; with False if it ended without a goodbye.
    :param client_code: the clients whose pickles are accepted, see :class:`shared_rpc.Server`.
    :raises ConfigurationError: if ``client_code`` is not one of the three.
    """

    def __init__(
        self,
        server_id: str,
        objects: ObjectStore,
        leases: LeaseTable,
        on_end: Callable[[str, bool], None],
        client_code: ClientCode = "all",
    ) -> None:
        if client_code not in get_args(ClientCode):
            raise ConfigurationError(f"client_code={client_code!r}: use 'all', 'namespace' or 'none'")
        self._client_code = client_code
        self._server_id = server_id
        self._objects = objects
        self._leases = leases
        self._on_end = on_end
        self._by_id: dict[str, Session] = {}

    def peer_of(self, session_id: Holder) -> Peer | None:
        """Return the client of a session; None without a connection: for this process's own calls and for tasks."""
        session = self._by_id.get(session_id) if isinstance(session_id, str) else None
        return session.peer if session is not None else None

    def pid_of(self, session_id: Holder) -> int:
        """Return the process of a session; this one if it has no connection."""
        peer = self.peer_of(session_id)
        return peer.pid if peer is not None else os.getpid()

    def admit_code(self, sock: socket.socket) -> bool:
        """Return True if the newly connected client may send code, for :meth:`begin`."""
        return self._client_code == "all" or (self._client_code == "namespace" and shares_pid_namespace(sock))

    def check_code(self, session_id: str, what: str) -> None:
        """Check that a session may send a pickle, which workers or other clients load.

        :raises CapabilityError: if it may not.
        """
        session = self._by_id.get(session_id)
        if session is not None and not session.may_send_code:
            whose = "clients outside of its pid namespace" if self._client_code == "namespace" else "clients"
            raise CapabilityError(
                f"the server (pid {os.getpid()}) accepts no pickles from {whose} (client_code={self._client_code!r}), and "
                f"{what} contains one: use plain tensors and scalars, or start the server with another --client-code"
            )

    def trust(self, session_id: str) -> None:
        """Let a session send pickles: its process was started by this server."""
        if session_id in self._by_id:
            self._by_id[session_id].may_send_code = True

    def begin(self, peer: Peer, may_send_code: bool) -> Session:
        """Begin the session of a connection."""
        session = Session(peer, may_send_code)
        self._by_id[session.session_id] = session
        if HOOKS.registered:
            HOOKS.emit(SessionOpened(server_id=self._server_id, session=session.session_id, pid=peer.pid))
        return session

    def closing(self, session_id: str) -> None:
        """Record that a session's client has announced its end."""
        if session_id in self._by_id:
            self._by_id[session_id].closing = True

    def end(self, session: Session) -> None:
        """End a session, after its connection ended."""
        del self._by_id[session.session_id]
        leases = len(self._leases.of_session(session.session_id))
        # A process that sent no goodbye but lives on has ended its session on purpose.
        clean = session.closing or not _ends(session.peer.pid)
        self._on_end(session.session_id, clean)
        if HOOKS.registered:
            HOOKS.emit(
                SessionClosed(
                    server_id=self._server_id,
                    session=session.session_id,
                    pid=session.peer.pid,
                    seconds=time.monotonic() - session.began,
                    leases=leases,
                    clean=clean,
                )
            )

    def holders(self, object_id: str) -> list[HolderInfo]:
        """Return the sessions and tasks that hold an object."""
        infos: list[HolderInfo] = []
        for holder in self._leases.holders(object_id):
            session = self._by_id.get(holder) if isinstance(holder, str) else None
            infos.append(
                {
                    "kind": "session" if isinstance(holder, str) else "task",
                    "session": holder if isinstance(holder, str) else holder.task_id,
                    "pid": self.pid_of(holder),
                    "since": session.since if session is not None else None,
                    "leases": self._leases.handles(holder, object_id),
                }
            )
        return infos

    def infos(self) -> list[SessionInfo]:
        """Return all sessions."""
        infos: list[SessionInfo] = []
        for session in self._by_id.values():
            held = self._leases.of_session(session.session_id)
            there = [stored for object_id in held if (stored := self._objects.get(object_id)) is not None and not stored.cold]
            infos.append(
                {
                    "session": session.session_id,
                    "pid": session.peer.pid,
                    "leases": len(held),
                    "nbytes": sum(usage_of(infos_of(there)).values()),
                    "since": session.since,
                }
            )
        return infos

    @property
    def ids(self) -> set[str]:
        """The ids of all sessions."""
        return set(self._by_id)

    def of_processes(self, pids: Collection[int]) -> list[str]:
        """Return the ids of these processes' sessions."""
        return [session.session_id for session in self._by_id.values() if session.peer.pid in pids]

    def __len__(self) -> int:
        return len(self._by_id)


#: PF_EXITING of the kernel (include/linux/sched.h). Set before the kernel closes a process's descriptors.
_EXITING = 0x4


def _ends(pid: int) -> bool:
    """Return True if a process has ended, or is exiting. A process in another pid namespace counts as ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return bool(int(stat.read().rpartition(b")")[2].split()[6]) & _EXITING)
    except (OSError, ValueError, IndexError):
        return True
