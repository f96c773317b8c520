"""Sessions of a client with a server: the search for it, and the leases that a session takes over from the one before.

The rules are here, without I/O, for the blocking client and for the one of coroutines.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shared_rpc.client.connection import Connection, Stranger, nobody_listens
from shared_rpc.client.handle import Lease
from shared_rpc.client.steps import Reply, Request, message_of
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded
from shared_rpc.errors.interrupts import is_of_handler
from shared_rpc.protocol import messages as m

__all__ = ["RETRY", "ClientSession", "LeaseBook", "Search", "Takeover", "held_of", "to_hold", "to_suspend"]

#: Seconds between two attempts to reach a server that is not there yet.
RETRY = 0.05
#: How many times one connection starts a server: a server that ends at once is not started for ever.
_SUMMONS = 3


@dataclass(eq=False)
class ClientSession:
    """A session, whose identity handles remember.

    A blocking client has its connections here: all of them, the idle ones, and those that are unusable, but open to keep the
    session until another connection does.
    """

    server_id: str
    token: str
    device: str
    transfer: ClientTransfer
    connections: set[Connection] = field(default_factory=set)
    idle: list[Connection] = field(default_factory=list)
    parked: list[Connection] = field(default_factory=list)
    ended: bool = False


class LeaseBook:
    """Handles by the session that their leases are in. Thread-safe.

    A lease ends with its session. Where the same server, by its id, has a new session for this client, because all
    connections broke or the server was restarted with the objects it kept, the client asks for leases on the same objects
    first. The handle of a dropped object stays with the ended session.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakSet[Lease[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, handle: Lease[Any]) -> None:
        """Note a handle."""
        with self._lock:
            self._handles.add(handle)

    def of(self, session: object) -> list[Lease[Any]]:
        """Return the handles whose leases are in a session."""
        with self._lock:
            return [handle for handle in self._handles if handle.in_session(session)]

    def of_object(self, object_id: str) -> list[Lease[Any]]:
        """Return the handles of an object, without those released."""
        with self._lock:
            return [handle for handle in self._handles if handle.object_id == object_id and not handle.released]

    @staticmethod
    def move(handles: Iterable[Lease[Any]], held: Iterable[str], session: object) -> list[str]:
        """Put handles into another session, as far as it has leases for them; return the ids of unwanted leases."""
        left = Counter(held)
        for handle in handles:
            if left[handle.object_id] and handle.move_to(session):
                left[handle.object_id] -= 1
        return list(left.elements())


def to_suspend(handles: Iterable[Lease[Any]], session: object) -> list[str]:
    """Return the ids of objects to suspend in a session that has taken handles over: those without an active handle."""
    moved = [handle for handle in handles if handle.in_session(session)]
    return list({handle.object_id for handle in moved} - {handle.object_id for handle in moved if not handle.suspended})


def to_hold(handles: Sequence[Lease[Any]]) -> Request:
    """Return the request for the leases of handles in a new session."""
    return Request(m.Hold([handle.object_id for handle in handles]), "the leases of this client")


def held_of(reply: Reply) -> list[str]:
    """Return the ids of the leased objects, each as often as it was asked for."""
    return message_of(reply, "the leases of this client", m.Held).object_ids


class Takeover:
    """The relation of a new connection to the session before it: it joins that, or begins another one.

    :param earlier: the session whose token the handshake had; None if it had none.
    """

    def __init__(self, leases: LeaseBook, earlier: ClientSession | None, welcome: m.Welcome) -> None:
        self.earlier = earlier
        self.welcome = welcome
        self.joined = earlier is not None and earlier.token == welcome.token
        #: Handles whose leases the new session takes over, and the ids of the granted leases.
        self.moving: list[Lease[Any]] = []
        self.held: list[str] = []
        if earlier is not None and not self.joined and earlier.server_id == welcome.server_id:
            self.moving = leases.of(earlier)

    @contextmanager
    def renewal(self, path: str) -> Iterator[Request]:
        """Turn the errors of asking for the leases into :class:`ConnectError`: a server that goes away at once is not there."""
        try:
            yield to_hold(self.moving)
        except (ConnectionClosed, DeadlineExceeded) as error:
            if is_of_handler(error):
                raise
            raise ConnectError(f"the server at {path} hung up during the handshake: {error}") from error

    def begin(self, transfer: ClientTransfer) -> ClientSession:
        """Return the session that begins."""
        return ClientSession(self.welcome.server_id, self.welcome.token, self.welcome.device, transfer)

    def move(self, session: ClientSession) -> list[str]:
        """Move the handles into the session that began; return the ids of unwanted leases."""
        return LeaseBook.move(self.moving, self.held, session)


class Search:
    """The attempts of a client to reach a server that may not listen yet.

    :param patience: seconds to wait for it, but not beyond ``deadline`` (time.monotonic()).
    :param summon: starts a server where none listens: called with the socket, ``patience`` and ``deadline``.
    """

    def __init__(
        self,
        path: str,
        patience: float,
        deadline: float = float("inf"),
        summon: Callable[[str, float, float], None] | None = None,
    ) -> None:
        self.path = path
        self._patience = patience
        self._deadline = deadline
        self._summon = summon
        self._summons = _SUMMONS if patience > 0 else 0
        self._begin = time.monotonic()
        self._until = min(deadline, self._begin + patience)

    def failed(self, error: ConnectError) -> float:
        """Handle a failed attempt; return the seconds to wait before the next one.

        :raises ConnectError: if there is to be none.
        """
        if isinstance(error, Stranger) or is_of_handler(error):
            raise error
        if self._summon is not None and self._summons and nobody_listens(error):
            self._summons -= 1
            self._summon(self.path, self._patience, self._deadline)
            self._until = min(self._deadline, time.monotonic() + self._patience)
            return 0.0
        if time.monotonic() + RETRY > self._until:
            raise ConnectError(
                f"{error} (waited {time.monotonic() - self._begin:.1f} s). Start a server with: shared-rpc serve app.py, or "
                f"SHARED_TENSOR_ROLE=server python app.py, with the same SHARED_TENSOR_BASE_PATH and device"
            ) from error
        return RETRY
