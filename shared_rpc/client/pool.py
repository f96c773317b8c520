"""The connections of one client process to one server, and the session they share."""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shared_rpc.client.connection import Connection, nobody_listens
from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.handle import Lease
from shared_rpc.client.session import RENEWAL, RETRY, ClientSession, LeaseBook, Renewal, Search, Takeover, renewing
from shared_rpc.client.steps import Reply, Request
from shared_rpc.client.transfer import ClientTransfer, TransferClosed
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded, SharedRPCError
from shared_rpc.errors.interrupts import is_interrupt, is_of_handler, passed_over
from shared_rpc.lifecycle.finalizer import FINALIZER

#: Seconds between two checks of connections with an outstanding answer.
_LOOK = 0.5


class Turn(msgspec.Struct, eq=False):
    """One operation of a client, from before its first request until its caller has the result."""

    #: Seconds to wait for a server that is not there yet; and the deadline, in terms of time.monotonic().
    patience: float = 0.0
    deadline: float = math.inf
    ended: bool = False
    #: The connection that the operation uses now, being opened or taken from the idle ones.
    connection: Connection | None = None
    #: The latest request of the operation, which has the answer.
    request: Request | None = None
    #: The session of the latest request, and so of the lease that came with the reply.
    session: ClientSession | None = None


class ConnectionPool:
    """Connections of a client in one session, one for each thread that waits. Thread-safe.

    A signal handler may raise between any two instructions of an operation, and so between getting a reply, a lease or a chunk
    of a pool, and noting it. Operations are not made proof against that. Their session is retired instead (:meth:`retire`):
    another one takes over the leases of the existing handles, and all that the old one had, noted or not, ends with it.

    One thread at a time uses a connection, and only that thread closes it. A thread that takes a connection out of the lists of
    its session, under the lock, has it until it puts it back. Once the session is ended, nothing is put into the lists or taken
    out: the connections in them are closed by :meth:`_hang_up`.

    :param path: the server's socket, looked up when the first connection is made.
    :param new_transfer: makes the pools of a new session.
    :param leases: the handles whose leases a new session takes over.
    :param moved: called in another thread, before a session that was retired ends.
    :param renewed: called with handles whose memory is outdated, and the seconds that there are to renew it.
    """

    def __init__(
        self,
        path: Callable[[], str],
        new_transfer: Callable[[], ClientTransfer],
        leases: LeaseBook,
        moved: Callable[[], object],
        renewed: Callable[[Sequence[Lease[Any]], float], object],
    ) -> None:
        self._path = path
        self._new_transfer = new_transfer
        self._leases = leases
        self._moved = moved
        self._renewed = renewed
        self.closed = False
        #: Starts a server where none listens: called with the socket's path, the seconds for the start, and the deadline.
        self.summon: Callable[[str, float, float], None] | None = None
        self._begin()

    def abandon(self, leases: LeaseBook) -> None:
        """Begin anew in a forked child; closing the copies of the parent's connections does not end them."""
        self._leases = leases
        for session in self._sessions():
            for connection in session.connections:
                connection.close()
            session.transfer.closed = True
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        #: Held while a session is ended. A signal handler may close a client that is being closed below it.
        self._ending = threading.RLock()
        #: Whether the finaliser thread polls parked connections for owed answers.
        self._polling = False
        #: Operations under way. :attr:`Turn.ended` notes the end of each; :meth:`end_soon` acts on it.
        self.turns: set[Turn] = set()
        #: Sessions with an interrupted operation, and the operations that may still use them.
        self.retired: dict[ClientSession, set[Turn]] = {}
        #: None before the first connection, after a session was retired, and after :meth:`close`.
        self.session: ClientSession | None = None

    def _sessions(self) -> list[ClientSession]:
        return [session for session in (self.session, *self.retired) if session is not None]

    @property
    def has_sessions(self) -> bool:
        """Whether there is something to end."""
        return bool(self._sessions())

    # Operations.

    def end_soon(self) -> None:
        """End retired sessions that waited for an operation that has ended."""
        FINALIZER.submit(functools.partial(_end_retired, weakref.ref(self)))

    def retire(self, turn: Turn) -> None:
        """Retire the session of an operation that was interrupted at a place that is not known."""
        turn.ended = True
        session = turn.session if turn.session is not None else self.session
        if turn.request is not None and turn.request.frame is not None:
            turn.request.frame.close()
        connection = turn.connection
        if connection is not None:
            with self._lock:
                lost = session is None or connection not in session.connections
                if session is not None and not lost and connection not in (*session.idle, *session.parked):
                    if session.ended:
                        lost = True  # the thread that ended it has left the connection to this one
                        session.connections.discard(connection)
                    else:
                        session.parked.append(connection)
            if lost:
                connection.close()
        if session is not None:
            self.retire_session(session)

    def retire_session(self, session: ClientSession) -> None:
        """Have another session take over the leases of this one, which ends."""
        with self._lock:
            if session is not self.session:
                return  # the session is retired already, or has ended
            self.session = None
            self.retired[session] = set(self.turns)
        # The session's end returns what the interrupted operation has of the pool, so no other operation may wait for it there.
        session.transfer.arguments.refuse()
        FINALIZER.start()
        self.end_soon()

    def end_retired(self) -> bool:
        """End the retired sessions that no operation is in any more; return False if one is to be tried again.

        It is called in a thread that no signal handler runs in.
        """
        done = True
        for session, turns in tuple(self.retired.items()):
            if all(turn.ended for turn in turns):
                done = self._end(session) and done
        return done

    def _end(self, session: ClientSession) -> bool:
        moving = self._leases.of(session)
        turn = Turn()
        try:
            if moving:
                renewal = Renewal(self._leases, moving)
                renewal.granted(self.exchange(renewal.request, time.monotonic() + PROMPT, 0, turn))
                new = turn.session
                assert new is not None, "a reply sets the session"
                if new.server_id == session.server_id:
                    renewal.move(new)
                for message in renewal.corrections():
                    self.exchange(Request(message, "the leases"), time.monotonic() + PROMPT, 0, turn).frame.close()
                if outdated := renewal.outdated():
                    self._renewed(outdated, RENEWAL)
                self._spare(new)
            self._moved()
        except (DeadlineExceeded, ConnectError) as error:
            if not self.closed and not (isinstance(error, ConnectError) and nobody_listens(error)):
                return False  # the server is stuck: the handles still need the old session
        except SharedRPCError:
            pass  # the session has ended, and its leases with it
        self._hang_up(session)
        self.retired.pop(session, None)
        return True

    def _spare(self, session: ClientSession) -> None:
        """Close a connection that this thread made, and that the session does not need."""
        with self._lock:
            surplus = session.idle.pop() if session.idle and len(session.connections) > 1 and not session.ended else None
        if surplus is not None:
            self._drop(session, surplus)

    def exchange(self, request: Request, deadline: float, patience: float, turn: Turn | None = None) -> Reply:
        """Send a request over a connection that no other thread uses meanwhile; return the reply.

        Where the server went away and the request can be repeated, it goes to the next server.

        :param deadline: when to give up, in terms of time.monotonic().
        :param patience: seconds to wait for a server that is not there yet.
        :param turn: the operation that the request belongs to, which stays in its session though that was retired.
        """
        turn = turn if turn is not None else Turn()
        turn.request = request
        while True:
            home = self._home(request, turn) if self.retired else None
            session, connection = self._acquire(home, deadline, patience, turn)
            if request.transfer is not None and request.transfer is not session.transfer:
                self._put_back(session, connection, turn)
                raise TransferClosed
            if request.sessions:
                request.keep_to(session)
            try:
                reply = connection.exchange(request, deadline)
            except ConnectionClosed as error:
                self._gave_up(session, connection, error, turn)
                if self.closed:
                    raise ConnectionClosed(f"this client was closed during {request.what}") from error
                if is_of_handler(error) or not request.repeatable or time.monotonic() > deadline:
                    raise
            except BaseException as error:
                self._gave_up(session, connection, error, turn)
                raise
            else:
                self._put_back(session, connection, turn)
                return reply

    def _home(self, request: Request, turn: Turn) -> ClientSession | None:
        """Return the retired session that a request must go to; None for the current one."""
        with self._lock:
            if request.transfer is not None:
                return next((session for session in self.retired if session.transfer is request.transfer), None)
            sessions = request.sessions if len(request.sessions) == 1 else [turn.session]
            return next((session for session in self.retired if session in sessions), None)

    def _gave_up(self, session: ClientSession, connection: Connection, error: BaseException, turn: Turn) -> None:
        """Handle a connection over which a request has failed."""
        try:
            if not connection.usable and not self.closed:
                if isinstance(error, ConnectionClosed) and not connection.owed:
                    # The server has ended the connection, and the session unless other connections keep it.
                    self._drop(session, connection)
                elif not is_interrupt(error):
                    # Abandoned between request and reply: the session must outlive the connection.
                    self._replace(session, connection, turn)
        finally:
            if connection.usable:
                self._put_back(session, connection, turn)
            elif self.closed:
                self._drop(session, connection)

    def need_session(self, turn: Turn) -> ClientSession:
        """Return the current session, after checking that the server was not restarted."""
        session, connection = self._acquire(None, turn.deadline, turn.patience, turn)
        self._put_back(session, connection, turn)
        return session

    def close(self) -> None:
        """Hang up; threads that wait are woken by that. Every later exchange fails."""
        with self._lock:
            self.closed = True
            for session in self._sessions():
                self.retired.setdefault(session, set())
            self.session = None
        try:
            self._end_all()
        except BaseException:
            FINALIZER.start()
            FINALIZER.submit(self._end_all)
            raise

    def _end_all(self) -> None:
        for session in tuple(self.retired):
            self._hang_up(session)
            self.retired.pop(session, None)

    def _hang_up(self, session: ClientSession) -> None:
        """End a session, also one whose end was interrupted before."""
        with self._ending:
            with self._lock:
                session.ended = True
                unused = {*session.idle, *session.parked}
                for connection in session.connections - unused:
                    connection.hang_up()  # the thread that waits on the connection takes it out of the set, and closes it
            for connection in unused:
                connection.say_goodbye()
                connection.close()
            session.transfer.close()

    # Connections.

    def _acquire(
        self, home: ClientSession | None, deadline: float, patience: float, turn: Turn
    ) -> tuple[ClientSession, Connection]:
        while True:
            with self._lock:
                if self.closed:
                    raise ConnectionClosed("this client is closed")
                session = home if home is not None else self.session
                if session is None or session.ended or not session.idle:
                    break
                # No call from here on, after which a signal handler could run: the connection is idle or the operation's.
                connection = session.idle[-1]
                turn.session, turn.connection = session, connection
                del session.idle[-1]
            if connection.alive:
                return session, connection
            self._drop(session, connection)
        if home is not None:
            return home, self._join(home, deadline, turn)
        return self._connect(deadline, patience, turn)

    def _put_back(self, session: ClientSession, connection: Connection, turn: Turn) -> None:
        with self._lock:
            if connection in session.connections and not session.ended:
                # No call from here on, after which a signal handler could run: another thread may use the connection at once.
                session.idle += (connection,)
                turn.connection = None
                return
        self._drop(session, connection)

    def _drop(self, session: ClientSession, connection: Connection) -> None:
        with self._lock:
            session.connections.discard(connection)
        connection.close()

    def _replace(self, session: ClientSession, connection: Connection, turn: Turn) -> None:
        if connection.owed:
            # The answer may bring memory to release, and the session lasts until then.
            self._park(session, connection, turn)
            with self._lock:
                polled, self._polling = self._polling, True
            if not polled:
                FINALIZER.start()
                FINALIZER.submit(functools.partial(_poll, weakref.ref(self)), after=_LOOK)
            return
        try:
            self._put_back(session, self._join(session, time.monotonic() + 1.0, Turn()), Turn())
        except SharedRPCError:
            # A server that is only stuck keeps the session for as long as this connection is open.
            self._park(session, connection, turn)
            return
        self._drop(session, connection)

    def _park(self, session: ClientSession, connection: Connection, turn: Turn) -> None:
        with self._lock:
            if not session.ended:
                # No call from here on, as in _put_back().
                session.parked += (connection,)
                turn.connection = None
                return
        self._drop(session, connection)

    def poll_parked(self) -> bool:
        """Read owed answers of parked connections; return whether there are more to wait for."""
        for session in self._sessions():
            with self._lock:
                if session.ended:
                    continue
                owing = [connection for connection in session.parked if connection.owed]
                session.parked = [connection for connection in session.parked if not connection.owed]
            for connection in owing:
                try:
                    in_order = connection.catch_up()
                except (SharedRPCError, OSError):
                    self._drop(session, connection)
                    continue
                with self._lock:
                    kept = connection in session.connections and not session.ended and not (in_order and session.idle)
                    if kept:
                        (session.idle if in_order else session.parked).append(connection)
                if not kept:
                    self._drop(session, connection)
        with self._lock:
            self._polling = any(connection.owed for session in self._sessions() for connection in session.parked)
            return self._polling

    def _join(self, session: ClientSession, deadline: float, turn: Turn) -> Connection:
        """Open one more connection of a session.

        :raises ConnectionClosed: if the session has ended.
        """
        connection = Connection(self._path())
        turn.session, turn.connection = session, connection
        connection.open(session.token, max(deadline - time.monotonic(), RETRY))
        if connection.welcome.token == session.token:
            with self._lock:
                if not session.ended:
                    session.connections.add(connection)
                    return connection
        connection.close()
        raise ConnectionClosed(f"the session with the server at {connection.path} has ended: call again")

    def _reach(self, deadline: float, patience: float, turn: Turn) -> tuple[Connection, Takeover]:
        """Wait for a server, and open a connection that joins the session, or begins another one, which has its leases then."""
        search = Search(self._path(), patience, deadline, self.summon)
        while True:
            session = self.session
            connection = turn.connection = Connection(search.path)
            try:
                connection.open(session.token if session is not None else "", max(deadline - time.monotonic(), RETRY))
                takeover = Takeover(self._leases, session, connection.welcome, connection.pid)
                if takeover.renewal is not None:
                    with renewing(search.path):
                        takeover.renewal.granted(connection.exchange(takeover.renewal.request, time.monotonic() + PROMPT))
                return connection, takeover
            except ConnectError as error:
                connection.close()
                time.sleep(search.failed(error))
            except BaseException:
                connection.close()
                raise

    def _connect(self, deadline: float, patience: float, turn: Turn) -> tuple[ClientSession, Connection]:
        connection, takeover = self._reach(deadline, patience, turn)
        ended: ClientSession | None = None
        renewal: Renewal | None = None
        parked: list[Connection] = []
        with self._lock:
            if self.closed:
                connection.close()
                raise ConnectionClosed("this client is closed")
            current = self.session
            if current is takeover.earlier and not takeover.joined:
                ended, renewal = current, takeover.renewal
                current = takeover.begin(self._new_transfer())
                current.connections.add(connection)
                if ended is not None:
                    self.retired[ended] = {turn}  # handles are moved later that a signal handler has left there
                self.session = turn.session = current
                takeover.move(current)
                if ended is not None:
                    del self.retired[ended]
            elif current is not None and current.token == takeover.welcome.token:
                turn.session = current
                current.connections.add(connection)
                # A connection that became idle meanwhile does as well.
                parked = [current.idle.pop()] if current.idle else []
                parked += [earlier for earlier in current.parked if not earlier.owed]
                current.parked = [earlier for earlier in current.parked if earlier.owed]
            else:
                current = None  # another thread has begun a session meanwhile: one is enough
        if ended is not None:
            self._hang_up(ended)
        if current is None:
            connection.close()
            return self._connect(deadline, patience, turn)
        for earlier in parked:
            self._drop(current, earlier)
        for message in renewal.corrections() if renewal is not None else ():
            with passed_over(SharedRPCError):
                connection.exchange(Request(message, "the leases"), time.monotonic() + PROMPT).frame.close()
        outdated = renewal.outdated() if renewal is not None else []
        if not outdated:
            return current, connection
        self._put_back(current, connection, turn)
        self._renewed(outdated, min(RENEWAL, max(deadline - time.monotonic(), 0.0)))
        return self._acquire(None, deadline, patience, turn)


def _poll(pool: weakref.ref[ConnectionPool]) -> None:
    """Poll parked connections in the finaliser thread, which must not keep a client alive."""
    found = pool()
    if found is not None and found.poll_parked():
        FINALIZER.submit(functools.partial(_poll, pool), after=_LOOK)


def _end_retired(pool: weakref.ref[ConnectionPool]) -> None:
    found = pool()
    if found is not None and not found.end_retired():
        FINALIZER.submit(functools.partial(_end_retired, pool), after=_LOOK)
