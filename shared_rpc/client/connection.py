"""One blocking connection of a client: a handshake, then requests, one at a time."""

from __future__ import annotations

import _socket
import errno
import os
import select
import socket
import time
from typing import ClassVar, Self, cast

from shared_rpc.client.exchange import BRIEFLY, PROMPT, Exchange, Exchanges, TooLate
from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ConnectError, ConnectionClosed, ProtocolError, SharedRPCError
from shared_rpc.errors.interrupts import is_interrupt, is_of_handler, passed_over
from shared_rpc.forks import after_fork
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.peers import Peer, answerer_of, ask_who_answers, foreign_owner, is_own_or_root, named, peer_of
from shared_rpc.protocol.socket import FrameSocket

_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
#: Seconds that a read or write waits by itself: most round trips are faster and need no poll(2).
_MOMENT = 0.004
#: Seconds; poll(2) counts milliseconds in an int.
_LONG = 3600.0


class Stranger(ConnectError):
    """The server of another user. To wait does not help: only that user can end it."""


def connect(sock: socket.socket, path: str) -> None:
    """Connect a socket to the server that listens at ``path``.

    :raises ConnectError: if no process listens, or another user's.
    """
    try:
        sock.connect(path)
    except OSError as error:
        if is_of_handler(error):
            raise
        raise _connect_error(error, path) from error
    _refuse_stranger(peer_of(sock), path)
    ask_who_answers(sock)


def _connect_error(error: OSError, path: str) -> ConnectError:
    """Return the error for a connect(2) that failed."""
    why = "no server listens there" if error.errno in (errno.ENOENT, errno.ECONNREFUSED) else str(error)
    owner = foreign_owner(path)
    if owner is not None:
        why += (
            f"; the file belongs to {named(owner)}, not to you (uid {os.geteuid()}), so no server of yours can listen there: "
            f"have that user remove it, or choose another base_path (SHARED_TENSOR_BASE_PATH)"
        )
    return ConnectError(f"cannot connect to {path}: {why}")


def nobody_listens(error: ConnectError) -> bool:
    """Return whether an error means that no process listens, not that a process does not answer or is another user's."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ECONNREFUSED)


def _refuse_stranger(peer: Peer, path: str) -> None:
    """Check whose server it is: by the process that listens, before anything is read or sent, and by the one that answers.

    :raises Stranger: if it is neither this user's nor root's, or another user's link led to it.
    """
    pid, uid, _ = peer
    way_out = "choose another base_path (SHARED_TENSOR_BASE_PATH), or have that user stop the server"
    if not is_own_or_root(uid):
        raise Stranger(
            f"the server at {path} belongs to {named(uid)}, not to you (uid {os.geteuid()}): it is pid {pid}; {way_out}"
        )
    owner = foreign_owner(path)
    if owner is not None and os.path.islink(path):
        # With fs.protected_symlinks, the kernel does not follow such a link.
        raise Stranger(
            f"{path} is a link of {named(owner)}, not yours (uid {os.geteuid()}), to another server: remove it, or {way_out}"
        )


def _seconds_until(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TooLate
    return left


class ExchangeSocket:
    """A connection to the server that listens at ``path``: a socket, and the exchanges over it."""

    welcome: m.Welcome
    #: The process that answers, where its first answer has come. Root's process may have made the socket listen for it.
    answerer: Peer | None = None
    _socket: FrameSocket
    _exchanges: Exchanges
    #: Whether the thread that uses it can wait for a GPU: no event loop can.
    _waits: ClassVar[bool]

    def __init__(self, path: str) -> None:
        self.path = path

    def _begin(self, sock: socket.socket) -> None:
        self._socket = FrameSocket(sock)
        self._exchanges = Exchanges(self.path, self._socket, waits=self._waits)
        # Open copies in the child would keep the parent's session from ending, and closing them does not end it. Also of a
        # connection that another thread is just opening.
        after_fork(self.abandon)

    def _receive(self) -> None:
        """Take in available bytes, as :meth:`FrameSocket.receive`; of the first ones, who sent them."""
        try:
            if self.answerer is None:
                self.answerer = answerer_of(self._socket.sock)
        except OSError as error:
            if isinstance(error, (BlockingIOError, InterruptedError)) or is_of_handler(error):
                raise
            raise ConnectionClosed(f"the connection broke: {error}") from error
        self._socket.receive()

    def _welcomed(self, greeting: Exchange) -> None:
        """Take the answer to the handshake, if this user or root gave it.

        :raises Stranger: if another user did. The text of a refusal is anybody's: a server may refuse before it is asked.
        """
        answer = greeting.answer
        refused = isinstance(answer, m.Error) and not answer.endpoint_raised
        if self.answerer is not None and not refused:
            _refuse_stranger(self.answerer, self.path)
        self.welcome = self._exchanges.welcome(greeting)

    @property
    def pid(self) -> int:
        """The process that answers, 0 for one in another pid namespace."""
        return self.answerer.pid if self.answerer is not None else 0

    @property
    def alive(self) -> bool:
        """Whether the server still holds the other end, as far as is known without asking."""
        try:
            while self._exchanges.broken is None and self._socket.sock.recv(1, _PEEK):
                if self._exchanges.under_way:
                    return True
                # This answers no request, and may be the reason for which the server hangs up.
                self._socket.receive()
                self._exchanges.deliver()
        except BlockingIOError:
            return True  # nothing to read, not even an end of file
        except (OSError, ProtocolError) as error:
            if is_of_handler(error):
                raise
        return False

    def abandon(self) -> None:
        """Close the copies of descriptors in a forked child."""
        self._socket.close()


class Connection(ExchangeSocket):
    """A blocking connection, once it was opened with :meth:`open`. One request is under way at a time."""

    _waits = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        #: The socket, in a list that is empty before the connection.
        self._sock: list[socket.SocketType] = []
        #: Whether the last exchange left the connection usable.
        self.usable = True

    def open(self, token: str, timeout: float) -> Self:
        """Connect and shake hands.

        :raises ConnectError: if no process answers, or another user's does.
        """
        try:
            # Made and stored in one expression of C: whenever a signal handler raises, close() finds the socket.
            self._sock.extend(map(_socket.socket, (socket.AF_UNIX,), (socket.SOCK_STREAM | socket.SOCK_CLOEXEC,)))
            self._begin(cast("socket.socket", self._sock[0]))
            self._socket.limit(min(timeout, PROMPT))
            connect(self._socket.sock, self.path)
            self._socket.limit(_MOMENT)
            with self._exchanges.greeting():
                greeting = self._exchanges.greet(token)
                self._await(greeting, time.monotonic() + min(timeout, PROMPT))
                self._welcomed(greeting)
        except BaseException:
            self.close()
            raise
        return self

    def exchange(self, request: Request, deadline: float) -> Reply:
        """Send a request and wait for its reply until ``deadline`` (time.monotonic()).

        :raises DeadlineExceeded: if there is none by then; the connection stays in order if the server confirms the withdrawal.
        :raises ConnectionClosed: if the server goes away.
        """
        self.usable = False
        try:
            exchange = self._exchanges.begin(request)
        except (ProtocolError, OSError) as error:
            self.usable = not is_of_handler(error) and self._exchanges.broken is None
            raise
        try:
            self._await(exchange, deadline)
        except TooLate:
            self._withdraw(exchange)
        except BaseException as error:
            if not is_interrupt(error):  # an interrupt retires the session, see ConnectionPool
                self._withdraw(exchange)
                self._exchanges.abandon(exchange)
                self._send_pending()
            raise
        self.usable = exchange.answer is not None
        return self._exchanges.reply(exchange)

    def _await(self, exchange: Exchange, deadline: float) -> None:
        """Send all that is queued, and pass on the updates of an exchange, until its answer is there."""
        exchanges, request = self._exchanges, exchange.request
        self._send(deadline)
        if request.transfer is not None:
            request.transfer.poll()  # while the server works
        while True:
            while exchange.updates:
                info = exchange.updates.popleft()
                if request.on_event is not None:
                    request.on_event(info)
                _seconds_until(deadline)
            if exchange.answer is not None:
                return
            if exchanges.broken is not None:
                raise exchanges.ended()
            try:
                self._receive()
                exchanges.deliver()
            except BlockingIOError as error:
                if is_of_handler(error):
                    raise
                self._wait(select.POLLIN, deadline, None if exchange.withdrawn else request.until)
                continue
            except (ConnectionClosed, ProtocolError) as error:
                if not is_of_handler(error):
                    exchanges.fail(error)
                raise
            if exchange.answer is None:
                self._send(deadline)
                _seconds_until(deadline)

    def _send(self, deadline: float) -> None:
        try:
            while not self._socket.flush():
                self._wait(select.POLLOUT, deadline)
        except ConnectionClosed as error:
            # A server that hung up may have sent the reason, which is read next.
            if is_of_handler(error):
                raise

    def _wait(self, events: int, deadline: float, until: int | None = None) -> None:
        """Wait until the socket is ready. poll(2) begins anew after a signal, with the time that is left.

        :raises TooLate: if the descriptor ``until`` is readable first.
        """
        left = _seconds_until(deadline)
        poll = select.poll()
        poll.register(self._socket.fileno(), events)
        if until is not None:
            poll.register(until, select.POLLIN)
        if [fd for fd, _ in poll.poll(min(left, _LONG) * 1000)] == [until]:
            raise TooLate

    def _withdraw(self, exchange: Exchange) -> None:
        with passed_over(TooLate, SharedRPCError):
            if self._exchanges.withdraw(exchange):
                self._await(exchange, time.monotonic() + BRIEFLY)

    def _send_pending(self) -> None:
        """Send the release of an abandoned answer. The connection is in order again if no answer is owed."""
        with passed_over(TooLate):
            self._send(time.monotonic() + BRIEFLY)
            self.usable = not self._exchanges.owed and self._exchanges.broken is None

    @property
    def owed(self) -> bool:
        """Whether an abandoned answer may still come, with memory and leases to release."""
        return bool(self._exchanges.owed)

    def catch_up(self) -> bool:
        """Read owed answers, as far as they have come; return whether the connection is in order again.

        :raises SharedRPCError: if the connection is of no use any more.
        """
        try:
            if not self._socket.flush():
                return False
            while self._exchanges.owed:
                self._socket.receive()
                self._exchanges.deliver()
        except BlockingIOError:
            return False
        if self._exchanges.broken is not None:
            raise self._exchanges.ended()
        self._send_pending()
        return self.usable

    def hang_up(self) -> None:
        """End the connection under a thread that waits on it, and that will :meth:`close` it."""
        with passed_over(OSError):  # the server hung up first
            self._socket.sock.shutdown(socket.SHUT_RDWR)

    def say_goodbye(self) -> None:
        """Notify the server that the session ends on purpose, as far as possible at once, if the connection is in order."""
        if not self.usable:
            return
        with passed_over(SharedRPCError, OSError, ValueError):
            self._exchanges.goodbye()
            self._socket.flush()

    def close(self) -> None:
        """Hang up, and close the descriptor."""
        for sock in self._sock:
            sock.close()
        if hasattr(self, "_socket"):
            self._socket.close()
