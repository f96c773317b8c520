"""The connections of one client process to one server, and the session they share."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shared_rpc.client.connection import PROMPT, Connection, Stranger, nobody_listens
from shared_rpc.client.holdings import Holdings, held_of, to_hold
from shared_rpc.client.lane import Lane, LaneClosed
from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded, SharedRPCError
from shared_rpc.handle import Lease
from shared_rpc.reaper import REAPER
from shared_rpc.wire import messages as m

__all__ = ["RETRY", "ConnectionPool", "Session", "nobody_there"]

#: Seconds between two tries to reach a server that is not there yet.
RETRY = 0.05
#: Seconds between two looks at connections over which an answer is still to come.
_LOOK = 0.5
#: How often one that connects has a server started: one that ends at once every time is not to be started for ever.
_SUMMONS = 3


@dataclass(frozen=True, eq=False)
class Session:
    """The server's account of this process: its identity is what handles remember."""

    server_id: str
    token: str
    device: str
    lane: Lane


def nobody_there(error: ConnectError, begin: float) -> ConnectError:
    """The error for a server that did not come up since ``begin`` (time.monotonic())."""
    return ConnectError(
        f"{error} (waited {time.monotonic() - begin:.1f} s). Start a server with: shared-rpc serve app.py, or "
        f"SHARED_TENSOR_ROLE=server python app.py, with the same SHARED_TENSOR_BASE_PATH and device"
    )


class ConnectionPool:
    """Gives every thread that waits a connection of its own, all of them in one session. Thread-safe.

    :param path: the server's socket, looked up when the first connection is made.
    :param new_lane: makes what a new session uses for short-lived memory.
    :param holdings: the handles whose leases a new session takes over.
    """

    def __init__(self, path: Callable[[], str], new_lane: Callable[[], Lane], holdings: Holdings) -> None:
        self._path = path
        self._new_lane = new_lane
        self._holdings = holdings
        self._closed = False
        #: Has a server listen where none does: called with the socket, the seconds it has for that, and the deadline.
        self.summon: Callable[[str, float, float], None] | None = None
        self._begin()

    def abandon(self, holdings: Holdings) -> None:
        """In a forked child: close the copies of the parent's connections, which does not end them, and begin anew."""
        self._holdings = holdings
        for connection in list(self._connections):
            connection.close()
        if self.session is not None:
            self.session.lane.closed = True
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        #: Unusable, and open to keep the session until another connection does.
        self._parked: list[Connection] = []
        #: Whether the reaper looks for answers that are owed to those.
        self._looked_after = False
        self._connections: set[Connection] = set()
        #: None before the first connection and after :meth:`close`.
        self.session: Session | None = None

    def exchange(self, request: Request, deadline: float, patience: float) -> Reply:
        """One round trip on a connection that nobody else uses meanwhile.

        Where the server went away and the request can be repeated, it goes to the one that comes.

        :param deadline: when to give up, in terms of time.monotonic().
        :param patience: seconds to wait for a server that is not there yet.
        """
        while True:
            connection = self._acquire(deadline, patience)
            if request.lane is not None and request.lane.closed:
                self._put_back(connection)
                raise LaneClosed
            try:
                return self._exchange_over(connection, request, deadline)
            except ConnectionClosed:
                if self._closed or not request.repeatable or time.monotonic() > deadline:
                    raise

    def _exchange_over(self, connection: Connection, request: Request, deadline: float) -> Reply:
        try:
            reply = connection.exchange(request, deadline)
        except BaseException as error:
            if self._closed and isinstance(error, ConnectionClosed):
                raise ConnectionClosed(f"this client was closed while it waited for {request.what}") from error
            if isinstance(error, ConnectionClosed) and not connection.usable and not connection.owed:
                # The server has ended it, and what of the session does not live on in other connections.
                self._drop(connection)
            elif not connection.usable and not self._closed:
                # Interrupted between request and reply: the session must outlive the connection.
                self._replace(connection)
            raise
        finally:
            if connection.usable:
                self._put_back(connection)
            elif self._closed:
                self._drop(connection)
        return reply

    def need_session(self, deadline: float, patience: float) -> Session:
        """The current session, of a server that is there; one that was restarted since is noticed here."""
        self._put_back(self._acquire(deadline, patience))
        session = self.session
        if session is None:
            raise ConnectionClosed("this client is closed")
        return session

    def close(self) -> None:
        """Hang up; threads that wait are woken by that. Every later exchange fails."""
        with self._lock:
            self._closed = True
            idle, self._idle, self._parked = [*self._idle, *self._parked], [], []
            waiting, self._connections = self._connections.difference(idle), set()
            session, self.session = self.session, None
        for connection in idle:
            connection.say_goodbye()
            connection.close()
        for connection in waiting:
            connection.hang_up()  # whoever waits on it closes it
        if session is not None:
            session.lane.close()

    def _acquire(self, deadline: float, patience: float) -> Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise ConnectionClosed("this client is closed")
                if not self._idle:
                    break
                connection = self._idle.pop()
            if connection.alive:
                return connection
            self._drop(connection)
        return self._connect(deadline, patience)

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._connections:
                self._idle.append(connection)
                return
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _replace(self, connection: Connection) -> None:
        if connection.owed:
            # The answer may bring memory, which nobody else would give back; and until then the session goes on.
            with self._lock:
                self._parked.append(connection)
                looked_after, self._looked_after = self._looked_after, True
            if not looked_after:
                REAPER.start()
                REAPER.submit(functools.partial(_look, weakref.ref(self)), after=_LOOK)
            return
        try:
            self._put_back(self._connect(time.monotonic() + 1.0, 0))
        except SharedRPCError:
            # If the server is stuck, and not gone, then it keeps the session for as long as this connection is open.
            with self._lock:
                self._parked.append(connection)
            return
        self._drop(connection)

    def look_after(self) -> bool:
        """See whether answers have come that were given up; False if there are none left to wait for."""
        with self._lock:
            owing = [connection for connection in self._parked if connection.owed]
            self._parked = [connection for connection in self._parked if not connection.owed]
        for connection in owing:
            try:
                in_order = connection.catch_up()
            except (SharedRPCError, OSError):
                self._drop(connection)
                continue
            with self._lock:
                kept = connection in self._connections and not (in_order and self._idle)
                if kept:
                    (self._idle if in_order else self._parked).append(connection)
            if not kept:
                self._drop(connection)
        with self._lock:
            self._looked_after = any(connection.owed for connection in self._parked)
            return self._looked_after

    def _connect(self, deadline: float, patience: float) -> Connection:
        path = self._path()
        begin = time.monotonic()
        until = min(deadline, begin + patience)
        summons = _SUMMONS if self.summon is not None and patience > 0 else 0
        while True:
            session = self.session
            try:
                connection, moving, held = self._open(path, session, deadline)
                break
            except Stranger:
                raise
            except ConnectError as error:
                if summons and self.summon is not None and nobody_listens(error):
                    summons -= 1
                    self.summon(path, patience, deadline)
                    until = min(deadline, time.monotonic() + patience)
                    continue
                if time.monotonic() + RETRY > until:
                    raise nobody_there(error, begin) from error
                time.sleep(RETRY)
        welcome = connection.welcome
        ended: Session | None = None
        unwanted: list[str] = []
        with self._lock:
            if self._closed:
                connection.close()
                raise ConnectionClosed("this client is closed")
            first = self.session is session
            if first and (session is None or session.token != welcome.token):
                self.session = Session(welcome.server_id, welcome.token, welcome.device, self._new_lane())
                if session is not None:
                    ended = session
                    unwanted = self._holdings.move(moving, held, self.session)
            mine = self.session is not None and self.session.token == welcome.token
            if mine:
                self._connections.add(connection)
            parked = [earlier for earlier in self._parked if not earlier.owed]
            self._parked = [earlier for earlier in self._parked if earlier.owed]
        if ended is not None:
            ended.lane.close()
        for earlier in parked:
            self._drop(earlier)
        if unwanted:
            with suppress(SharedRPCError):
                connection.exchange(Request(m.Release(unwanted), "release"), time.monotonic() + PROMPT)
        if not mine:  # another thread began a session meanwhile, and one is enough
            connection.close()
            return self._connect(deadline, patience)
        return connection

    def _open(self, path: str, session: Session | None, deadline: float) -> tuple[Connection, list[Lease[Any]], list[str]]:
        """A connection that joins a session, or begins one: then with the handles of the one before it, and what the new one
        holds of their objects.

        :raises ConnectError: if there is no server, or it goes away at once.
        """
        connection = Connection(path, session.token if session is not None else "", max(deadline - time.monotonic(), RETRY))
        welcome = connection.welcome
        if session is None or session.token == welcome.token or session.server_id != welcome.server_id:
            return connection, [], []
        moving = self._holdings.of(session)
        if not moving:
            return connection, [], []
        try:
            reply = connection.exchange(to_hold(moving), time.monotonic() + PROMPT)
            return connection, moving, held_of(reply)
        except (ConnectionClosed, DeadlineExceeded) as error:
            connection.close()
            raise ConnectError(f"the server at {path} hung up: {error}") from error
        except BaseException:
            connection.close()
            raise


def _look(pool: weakref.ref[ConnectionPool]) -> None:
    """In the reaper's thread, which must not keep a client that nobody has any more."""
    found = pool()
    if found is not None and found.look_after():
        REAPER.submit(functools.partial(_look, pool), after=_LOOK)
