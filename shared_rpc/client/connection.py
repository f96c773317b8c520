"""One blocking connection of a client: a handshake, then requests, one at a time."""

from __future__ import annotations

import _socket
import errno
import itertools
import os
import select
import socket
import time
import weakref
from typing import Self, cast

from shared_rpc.client.replies import event_of, gave_up, is_last, message_of, to_give_back, too_late
from shared_rpc.client.steps import Reply, Request
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded, ProtocolError, SharedRPCError
from shared_rpc.lifecycle.interrupts import is_interrupt, is_of_handler, passed_over
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.peers import peer_of
from shared_rpc.protocol.socket import FrameSocket

__all__ = ["LAST_ID", "PEEK", "PROMPT", "Connection", "Stranger", "connect_error", "nobody_listens", "refuse_stranger"]

PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
#: Seconds a server has for the handshake, and for answering a cancellation.
PROMPT = 5.0
#: Seconds that a read or a write waits by itself: most round trips take no longer, and cost no poll(2).
_MOMENT = 0.004
#: Seconds; poll(2) counts milliseconds in an int.
_LONG = 3600.0
#: Seconds it has to answer one that is interrupted, before another connection takes the place of this one.
_BRIEFLY = 1.0
#: Request ids have 32 bits, begin again after the last one, and 0 is the server's own.
LAST_ID = (1 << 32) - 1


class Stranger(ConnectError):
    """Somebody else's server. Waiting for another one does not help: nobody but its user can take it away."""


def connect_error(error: OSError, path: str) -> ConnectError:
    """Why connect(2) failed, for people."""
    why = "no server listens there" if error.errno in (errno.ENOENT, errno.ECONNREFUSED) else str(error)
    owner = _foreign_owner(path)
    if owner is not None:
        why += (
            f"; the file belongs to uid {owner}, not to you (uid {os.geteuid()}), so that no server of yours can listen there: "
            f"have that user remove it, or choose another base_path (SHARED_TENSOR_BASE_PATH)"
        )
    return ConnectError(f"cannot connect to {path}: {why}")


def _foreign_owner(path: str) -> int | None:
    """Whose file it is, if neither this user's nor root's."""
    try:
        uid = os.lstat(path).st_uid
    except OSError as error:
        if is_of_handler(error):
            raise
        return None
    return uid if uid not in (os.geteuid(), 0) else None


def nobody_listens(error: ConnectError) -> bool:
    """Whether that is why: neither a server that does not answer, nor somebody else's."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ECONNREFUSED)


def refuse_stranger(sock: socket.socket, path: str) -> None:
    """Before anything is read or sent.

    :raises Stranger: if the server is neither this user's nor root's, or another user's link led to it.
    """
    pid, uid, _ = peer_of(sock)
    way_out = "choose another base_path (SHARED_TENSOR_BASE_PATH), or have that user end it"
    if uid not in (os.geteuid(), 0):
        raise Stranger(
            f"the server at {path} belongs to uid {uid}, not to you (uid {os.geteuid()}): it is pid {pid}; {way_out}"
        )
    owner = _foreign_owner(path)
    if owner is not None and os.path.islink(path):
        # Where fs.protected_symlinks is set, the kernel does not follow it.
        raise Stranger(
            f"{path} is a link of uid {owner}, not yours (uid {os.geteuid()}), to another server: remove it, or {way_out}"
        )


class _TooLate(TimeoutError):
    """The deadline passed. A class of its own, because a callback may raise TimeoutError too."""


def _check(deadline: float) -> float:
    """The seconds that are left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise _TooLate
    return left


class Connection:
    """A connection to the server that listens at ``path``, once it was opened with :meth:`open`."""

    welcome: m.Welcome
    _socket: FrameSocket

    def __init__(self, path: str) -> None:
        self.path = path
        #: The socket, as soon as there is one.
        self._sock: list[socket.SocketType] = []
        self._ids = itertools.count()
        self._usable = True
        #: A request that was given up, by its number, whose answer the server still owes.
        self._owed: tuple[int, Request] | None = None
        #: Arenas whose descriptors the server has had over this connection.
        self._sent: set[str] = set()

    def open(self, token: str, timeout: float) -> Self:
        """Connect and shake hands.

        :raises ConnectError: if nobody answers there, or somebody else's process does.
        """
        try:
            # Made and stored in one expression of C: whenever a signal handler raises, close() finds it.
            self._sock.extend(map(_socket.socket, (socket.AF_UNIX,), (socket.SOCK_STREAM | socket.SOCK_CLOEXEC,)))
            self._socket = FrameSocket(cast("socket.socket", self._sock[0]))
            _open.add(self)
            self._socket.limit(min(timeout, PROMPT))
            self._connect(self._socket.sock)
            self._socket.limit(_MOMENT)
            self.welcome = self._greet(token, time.monotonic() + min(timeout, PROMPT))
        except BaseException:
            self.close()
            raise
        return self

    def _connect(self, sock: socket.socket) -> None:
        try:
            sock.connect(self.path)
        except OSError as error:
            if is_of_handler(error):
                raise
            raise connect_error(error, self.path) from error
        refuse_stranger(sock, self.path)

    def _greet(self, token: str, deadline: float) -> m.Welcome:
        try:
            self._socket.queue(m.Hello(token), 0)
            self._send(deadline)
            frame = self._receive(deadline)
        except _TooLate as error:
            raise ConnectError(f"the server at {self.path} does not answer") from error
        except ConnectionClosed as error:
            raise ConnectError(f"the server at {self.path} hung up: {error}") from error
        welcome = message_of(frame)
        if not isinstance(welcome, m.Welcome):
            raise ProtocolError(f"the server at {self.path} greets with {type(welcome).__name__}")
        return welcome

    def _send(self, deadline: float) -> None:
        # A server that hung up may have said why, and that is still to be read.
        with passed_over(ConnectionClosed):
            while not self._socket.flush():
                self._wait(select.POLLOUT, deadline)

    def _receive(self, deadline: float) -> Frame:
        self._await_frame(deadline)
        return self._socket.frames.popleft()

    def _await_frame(self, deadline: float) -> None:
        while not self._socket.ready():
            try:
                self._socket.receive()
                _check(deadline)
            except BlockingIOError as error:
                if is_of_handler(error):
                    raise
                self._wait(select.POLLIN, deadline)

    def _wait(self, events: int, deadline: float) -> None:
        """For what is not there at once. poll(2) begins anew after a signal too, but with the time that is left."""
        left = _check(deadline)
        poll = select.poll()
        poll.register(self._socket.fileno(), events)
        poll.poll(min(left, _LONG) * 1000)

    def exchange(self, request: Request, deadline: float) -> Reply:
        """Send a request and wait for its reply until ``deadline`` (time.monotonic()).

        :raises DeadlineExceeded: in time; the connection stays good, because the server was told and has answered.
        :raises ConnectionClosed: if the server goes away.
        """
        number = self._next_id()
        self._usable = False
        try:
            request.queue(self._socket, number, self._sent)
        except (ProtocolError, OSError) as error:
            self._usable = not is_of_handler(error)  # nothing of it was queued
            raise
        try:
            self._send(deadline)
            request.meanwhile()
            frame = self._await_reply(number, deadline, request)
        except _TooLate:
            frame = self._give_up(request, number)
        except BaseException as error:
            if isinstance(error, ConnectionClosed):
                request.interrupted(self._socket)
            if not is_interrupt(error):  # whose session is retired, see ConnectionPool
                self._take_back(request, number)
            raise
        self._usable = True
        return Reply(message_of(frame), frame)

    def _next_id(self) -> int:
        return next(self._ids) % LAST_ID + 1

    def _await_reply(self, number: int, deadline: float, request: Request, *, tell: bool = True) -> Frame:
        while True:
            self._await_frame(deadline)
            # No call in between: its descriptors belong to the socket or to the request.
            frame = self._socket.frames[0]
            request.frame = frame
            del self._socket.frames[0]
            if frame.request_id == number:
                event = event_of(frame, request)
                if event is None:
                    return frame
                if isinstance(event, m.Free):
                    self._socket.queue(event, 0)
                    self._send(deadline)
                elif tell and request.on_event is not None:
                    request.on_event(event)
                _check(deadline)
                continue
            if frame.request_id == 0:  # the server's last word to this connection
                message_of(frame)
            frame.close()

    def _give_up(self, request: Request, number: int) -> Frame:
        """Tell the server; its answer is either that it knows, or the reply, which came just in time."""
        try:
            frame = self._last_word(request, number, time.monotonic() + PROMPT)
        except _TooLate:
            raise DeadlineExceeded(f"{request.what} was not answered in time, and the server at {self.path} is stuck") from None
        if gave_up(frame):
            frame.close()
            self._usable = True
            raise too_late(request.what)
        return frame

    def _take_back(self, request: Request, number: int) -> None:
        """Its asker was interrupted, or hung up on. Where the server answers, the connection is in order again, and what it
        granted was given back.
        """
        with passed_over(_TooLate, SharedRPCError):
            self._give_back(self._last_word(request, number, time.monotonic() + _BRIEFLY), request)

    def _last_word(self, request: Request, number: int, deadline: float) -> Frame:
        """Have the server know that nobody waits: its last answer. Where that does not come now, it is :attr:`owed`."""
        self._owed = number, request.forgotten()
        try:
            self._socket.queue(m.Cancel(), number)
            self._send(deadline)
            frame = self._await_reply(number, deadline, request, tell=False)
        except SharedRPCError:
            self._owed = None
            raise
        self._owed = None
        return frame

    def _give_back(self, frame: Frame, request: Request) -> None:
        """An answer came that nobody takes: what it granted goes back, and then the connection is in order."""
        briefly = time.monotonic() + _BRIEFLY
        release = to_give_back(frame, request)
        with passed_over(_TooLate):
            if release is not None:
                number = self._next_id()
                self._socket.queue(release, number)
                self._send(briefly)
                self._await_reply(number, briefly, request, tell=False).close()
            self._usable = True

    @property
    def owed(self) -> bool:
        """Whether an answer may still come that was given up, and with it memory and leases to give back."""
        return self._owed is not None

    def catch_up(self) -> bool:
        """Take the answer that is owed, if it has come: whether the connection is in order again. Does not wait for it.

        :raises SharedRPCError: if the connection is of no use any more.
        """
        if self._owed is None:
            return self._usable
        number, request = self._owed
        try:
            if not self._socket.flush():
                return False
            while True:
                frame = self._socket.next_frame()
                if frame is None:
                    self._socket.receive()
                elif frame.request_id == number and is_last(frame):
                    self._owed = None
                    self._give_back(frame, request)
                    return self._usable
                else:
                    if frame.request_id == 0:  # the server's last word to this connection
                        message_of(frame)
                    frame.close()
        except BlockingIOError:
            return False

    @property
    def usable(self) -> bool:
        """Whether the last exchange left the connection in order."""
        return self._usable

    @property
    def alive(self) -> bool:
        """Whether the server still holds the other end, as far as this one can tell without asking."""
        if not self._sock or self._socket.fileno() < 0:
            return False
        try:
            self._socket.sock.recv(1, PEEK)
        except BlockingIOError:
            return True  # nothing to read, not even the end
        except OSError as error:
            if is_of_handler(error):
                raise
            return False
        return False

    def hang_up(self) -> None:
        """End the connection under a thread that waits on it, whose it is to :meth:`close` it."""
        with passed_over(OSError):  # the server was first
            self._socket.sock.shutdown(socket.SHUT_RDWR)

    def say_goodbye(self) -> None:
        """Tell the server that the session ends on purpose, as far as that goes at once and the connection is in order."""
        if not self._usable:
            return
        with passed_over(SharedRPCError, OSError, ValueError):
            self._socket.queue(m.Goodbye(), 0)
            self._socket.flush()

    def close(self) -> None:
        """Hang up, and give up the descriptor."""
        for sock in self._sock:
            sock.close()
        if hasattr(self, "_socket"):
            self._socket.close()


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork() -> None:
    # Closing the child's copies does not end the parent's session, and keeping them would outlive it: also that of a
    # connection which another thread was just making.
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_after_fork)
