"""The connection of a client to its server, which is the session: it carries the requests of all threads or coroutines.

There is no background thread or task. Of the callers that wait for answers one reads for all, and wakes the others for theirs;
when it has its own, another one becomes the reader. Writing never blocks: output that the socket does not accept at once stays
queued, and is sent by callers that wait for answers.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Self

from shared_rpc.client.exchange import BRIEFLY, PROMPT, Exchange, Exchanges, TooLate
from shared_rpc.client.steps import Reply, Request
from shared_rpc.client.transfer import ClientTransfer
from shared_rpc.errors import ConnectError, ConnectionClosed, ProtocolError, SharedRPCError
from shared_rpc.forks import after_fork
from shared_rpc.lifecycle.finalizer import FINALIZER
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.peers import Peer, answerer_of, foreign_owner, is_own_or_root, named, peer_of, request_credentials
from shared_rpc.protocol.socket import FrameSocket

#: Seconds that a read blocks without poll(2): most round trips are faster.
_MOMENT = 0.004
#: Seconds; poll(2) counts milliseconds in an int.
_LONG = 3600.0
#: Seconds between checks for an answer by a caller whose request is not completely written.
_SLICE = 0.1
#: The reason for the end of a connection whose state may be half changed.
_INTERRUPTED = "an operation was interrupted while it used the connection"
#: Seconds between two checks of a connection without waiting callers: with data to read, and with output to send.
_LOOK, _SOON = 0.5, 0.05


class ForeignServer(ConnectError):
    """The server of another user. Waiting does not help: only that user can end it."""


def new_socket(path: str, flags: int = 0) -> socket.socket:
    """Return a socket for :func:`connect`.

    :raises ConnectError: if this process has too many descriptors.
    """
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | flags)
    except OSError as error:
        if error.errno is None:  # a signal handler's own
            raise
        raise ConnectError(f"cannot connect to {path}: {error}") from error


def connect(sock: socket.socket, path: str) -> None:
    """Connect a socket to the server at ``path``.

    :raises ConnectError: if no process listens, or only another user's.
    """
    try:
        sock.connect(path)
    except OSError as error:
        if error.errno is None:  # a signal handler's own
            raise
        raise _connect_error(error, path) from error
    _refuse_foreign(peer_of(sock), path)
    request_credentials(sock)


def _connect_error(error: OSError, path: str) -> ConnectError:
    """Return the error for a failed connect(2)."""
    why = "no server listens there" if error.errno in (errno.ENOENT, errno.ECONNREFUSED) else str(error)
    owner = foreign_owner(path)
    if owner is not None:
        why += (
            f"; the file belongs to {named(owner)}, not to you (uid {os.geteuid()}), so no server of yours can listen there: "
            f"have that user remove it, or choose another base_path (SHARED_TENSOR_BASE_PATH)"
        )
    return ConnectError(f"cannot connect to {path}: {why}")


def no_listener(error: ConnectError) -> bool:
    """Return True if an error means that no process listens, rather than one that does not answer or is another user's."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ECONNREFUSED)


def _refuse_foreign(peer: Peer, path: str) -> None:
    """Check the user of the process that listens, before any I/O, or of the process that answers.

    :raises ForeignServer: if it is neither this user nor root, or another user's link led to it.
    """
    pid, uid = peer
    way_out = "choose another base_path (SHARED_TENSOR_BASE_PATH), or have that user stop the server"
    if not is_own_or_root(uid):
        raise ForeignServer(
            f"the server at {path} belongs to {named(uid)}, not to you (uid {os.geteuid()}): it is pid {pid}; {way_out}"
        )
    owner = foreign_owner(path)
    if owner is not None and os.path.islink(path):
        # With fs.protected_symlinks, the kernel does not follow such a link.
        raise ForeignServer(
            f"{path} is a link of {named(owner)}, not yours (uid {os.geteuid()}), to another server: remove it, or {way_out}"
        )


class Link:
    """A connection to the server at ``path``, and the session of the same lifetime. Thread-safe.

    The state is changed under a lock that is never held while a caller waits. Bytes are read by the exchange that is the
    reader, and only without a reader by :meth:`catch_up` or :meth:`close`.
    """

    #: The class of a wait: ``set()`` ends it, once.
    _WAIT: ClassVar[type[Any]]
    #: The ids of the server and of its device, and its process, 0 for one in another pid namespace: available after the
    #: handshake.
    server_id: str = ""
    device: str = ""
    pid: int = 0
    #: The pools of the session; a link that only waits for news has none.
    transfer: ClientTransfer
    #: True if the leases of the session are lost, or another session takes them over.
    ended = False
    #: The process that sent the first answer. Another process, of root, may have created its listening socket.
    answerer: Peer | None = None

    def __init__(self, path: str, sock: socket.socket) -> None:
        self.path = path
        self._socket = FrameSocket(sock)
        self._exchanges = Exchanges(path, self._socket)
        self._lock = threading.RLock()
        #: The exchange whose caller reads for all, and that caller's thread; 0 for a coroutine.
        self._reader: Exchange | None = None
        self._thread = 0
        #: The waits of callers for the reader. There are none without a reader.
        self._waiting: dict[Exchange, Any] = {}
        self._attended = False
        # Open copies in the child would keep the parent's session from ending, and closing them does not end it. Also for a
        # connection that another thread is just opening.
        after_fork(self.abandon)

    @property
    def usable(self) -> bool:
        """True unless the connection is known to have ended."""
        return self._exchanges.broken is None

    @property
    def ready(self) -> bool:
        """True if it is :attr:`usable`, and this thread is not in a signal handler that interrupted a change of its state."""
        # _is_owned() is private, as in shared_rpc.forks.
        return self._exchanges.broken is None and not self._lock._is_owned()  # type: ignore[attr-defined]

    # Requests.

    def post(self, message: m.Message) -> None:
        """Send a message whose answer is not needed, from any thread. Never blocks: unsent output is sent later.

        :raises ConnectionClosed: if the connection has ended.
        """
        intact = False
        try:
            with self._lock:
                if not self.usable:
                    raise self._exchanges.ended()
                self._exchanges.notify(message)
                self._flush()
                intact = True
        finally:
            if not intact:
                self._break(ConnectionClosed(_INTERRUPTED))
        self._attend()

    def _start(self, request: Request, thread: int = 0) -> Exchange:
        """Send a request. Its caller becomes the reader if there is none and this is a thread."""
        with self._lock:
            exchange = self._exchanges.begin(request)
            self._flush()
            if thread and self._reader is None:
                self._reader, self._thread = exchange, thread
        return exchange

    def _flush(self) -> bool:
        try:
            return self._socket.flush()
        except ConnectionClosed:
            return True  # a server that hung up may have sent the reason, which is read next

    def _finish(self, exchange: Exchange) -> Reply:
        """End an exchange and return its reply; see :meth:`Exchanges.reply` for the errors."""
        if exchange.answer is None:
            with self._lock:
                if exchange.answer is None:
                    self._exchanges.abandon(exchange)
            self._attend()
        return self._exchanges.reply(exchange)

    def _give_up(self, exchange: Exchange | None) -> None:
        """Withdraw a request whose caller no longer waits, neither for the answer nor for that of the cancellation.

        If the caller was interrupted outside of its wait, the state may be half changed, so the connection ends.
        """
        intact = False
        try:
            with self._lock:
                if exchange is not None and exchange.waits:
                    self._leave(exchange)
                    self._exchanges.withdraw(exchange)
                    self._exchanges.abandon(exchange)
                    self._flush()
                    intact = True
        finally:
            if not intact:
                with self._lock:
                    self._break(ConnectionClosed(_INTERRUPTED))
                    if exchange is not None:
                        self._leave(exchange)
                        self._exchanges.abandon(exchange)
        self._attend()

    # One reads for all.

    def _take_turn(self, exchange: Exchange, thread: int = 0) -> Any:
        """Return True if the caller becomes the reader; otherwise a wait, which ends when there is news for the caller, or when
        it must read.

        A caller also becomes the reader in a signal handler of the reader's thread, which continues afterwards.

        :returns: None if there is news.
        :raises SharedRPCError: if the connection has ended.
        """
        with self._lock:
            if exchange.updates or exchange.answer is not None:
                return None
            if self._exchanges.broken is not None:
                raise self._exchanges.ended()
            reader = self._reader
            if reader is None or reader is exchange or (thread and thread == self._thread):
                if reader is not exchange:
                    exchange.below, self._reader = reader, exchange
                self._thread = thread
                return True
            wait = self._waiting[exchange] = self._WAIT()
            return wait

    def _leave(self, exchange: Exchange) -> None:
        """End a turn; a reader hands over the reading."""
        with self._lock:
            self._waiting.pop(exchange, None)
            if self._reader is not exchange:
                return
            self._reader, exchange.below = exchange.below, None
            if self._reader is None:
                if self._waiting:
                    self._hand_over()
                if self._reader is None and self._exchanges.broken is not None:
                    self._close()

    def _hand_over(self) -> None:
        following = next((each for each in self._waiting if each.answer is None), None)
        if following is not None:
            self._reader, self._thread = following, 0
            self._wake(following)

    def _wake(self, exchange: Exchange) -> None:
        wait = self._waiting.pop(exchange, None)
        if wait is not None:
            wait.set()

    def _wake_all(self) -> None:
        for exchange in tuple(self._waiting):
            self._wake(exchange)

    def _read(self, *, wait: bool = True) -> None:
        """Receive bytes from the socket; with the first ones, check the sender.

        :raises ConnectionClosed: if there are no further ones.
        """
        try:
            if self.answerer is None:
                self.answerer = answerer_of(self._socket.sock)
        except OSError as error:
            if isinstance(error, (BlockingIOError, InterruptedError)) or error.errno is None:
                raise
            raise ConnectionClosed(f"the connection broke: {error}") from error
        self._socket.read(wait=wait)

    def _deliver(self) -> None:
        """Deliver the received frames, and wake the callers that have news."""
        self._socket.take()
        for exchange in self._exchanges.deliver():
            self._wake(exchange)
        if self._exchanges.broken is not None:
            self._end()

    def _attend(self) -> None:
        """Have another thread send queued output and read owed answers, in case no caller does so soon."""
        if (self._exchanges.owed or self._socket.unsent) and not self._attended and self.usable:
            self._attended = True
            FINALIZER.start()
            FINALIZER.submit(functools.partial(_attend, weakref.ref(self)), after=_SOON if self._socket.unsent else _LOOK)

    def catch_up(self) -> None:
        """Send queued output, and read owed answers, unless that blocks or a caller does so. The rest is retried
        later.
        """
        with self._lock:
            self._attended = False
            if not self.usable:
                return
            self._flush()
            try:
                while self._exchanges.owed and self._reader is None:
                    self._read(wait=False)
                    self._deliver()
                self._flush()
            except BlockingIOError:
                pass
            except (ConnectionClosed, ProtocolError) as error:
                self._break(error)
        self._attend()

    # The handshake.

    @contextmanager
    def _handshake(self) -> Iterator[Exchange]:
        """Connect, and begin the handshake; the block waits for its answer.

        :raises ConnectError: if no process answers, or only another user's.
        """
        try:
            connect(self._socket.sock, self.path)
            with self._exchanges.greeting():
                with self._lock:
                    greeting = self._exchanges.greet()
                    self._flush()
                yield greeting
                if greeting.answer is None:
                    raise TooLate
                self._welcomed(greeting)
        except BaseException:
            self._break(ConnectionClosed("the handshake failed"))  # without a goodbye: the peer may be a stranger
            raise

    def _welcomed(self, greeting: Exchange) -> None:
        """Process the answer to the handshake, if this user or root sent it.

        :raises ForeignServer: if another user did. A refusal is accepted from any user: it may precede the handshake.
        """
        answer = greeting.answer
        refused = isinstance(answer, m.Error) and not answer.endpoint_raised
        if self.answerer is not None and not refused:
            _refuse_foreign(self.answerer, self.path)
        welcome = self._exchanges.welcome(greeting)
        self.server_id, self.device = welcome.server_id, welcome.device
        self.pid = self.answerer.pid if self.answerer is not None else 0

    # The end.

    def close(self, reason: str = "this client was closed") -> None:
        """Notify the server that the session ends on purpose, if possible without blocking, and hang up. All waiting callers
        get the reason.
        """
        ended = ConnectionClosed(reason)
        with self._lock:
            try:
                if self.usable:
                    with suppress(SharedRPCError, OSError, ValueError):
                        self._exchanges.goodbye()
                        self._socket.flush()
            finally:
                self._break(ended)

    def _break(self, error: Exception) -> None:
        with self._lock:
            self._exchanges.fail(error)
            self._end()

    def _end(self) -> None:
        """Wake all waiting callers after the end of the connection. The reader, if there is one, closes the socket."""
        with suppress(OSError):  # it is not connected, or closed
            self._socket.sock.shutdown(socket.SHUT_RDWR)
        self._wake_all()
        if self._reader is None:
            self._close()

    def _close(self) -> None:
        self._socket.close()

    def abandon(self) -> None:
        """Close the copies of descriptors in a forked child, where the session is another process's."""
        self._socket.close()
        self._exchanges.known.clear()
        self.ended = True
        if hasattr(self, "transfer"):
            self.transfer.closed = True


def _attend(link: weakref.ref[Link]) -> None:
    """Maintain a connection in the finaliser thread, which must not keep it alive."""
    found = link()
    if found is not None:
        found.catch_up()


def _seconds_until(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TooLate
    return left


class _Sleep:
    """The wait of a thread that does not read."""

    __slots__ = ("_lock", "set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire(blocking=False)
        self.set = self._lock.release

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds`` at most."""
        self._lock.acquire(timeout=seconds)


class BlockingLink(Link):
    """A link for threads, made with :meth:`open`.

    A signal handler may raise within :meth:`exchange`: in its wait, or in its callback, the request is withdrawn, and elsewhere
    the connection ends.
    """

    _WAIT = _Sleep

    @classmethod
    def open(cls, path: str, timeout: float) -> Self:
        """Connect and perform the handshake.

        :raises ConnectError: if no process answers, or only another user's.
        """
        link, until = cls(path, new_socket(path)), time.monotonic() + min(timeout, PROMPT)
        link._socket.limit(min(timeout, PROMPT))
        with link._handshake() as greeting:
            link._socket.limit(_MOMENT)
            link._await(greeting, until)
        return link

    def exchange(self, request: Request, deadline: float) -> Reply:
        """Send a request and wait for its reply until ``deadline`` (time.monotonic()).

        :raises DeadlineExceeded: if there is none by then; a reply that just arrived is returned.
        :raises ConnectionClosed: if the server disconnects, or the link is closed.
        """
        exchange: Exchange | None = None
        thread, earlier = threading.get_ident(), self._reader
        try:
            exchange = self._start(request, thread)
            if request.transfer is not None:
                request.transfer.poll()  # while the server works
            try:
                self._await(exchange, deadline)
            except TooLate:
                self._withdraw(exchange)
        except BaseException:
            if exchange is None and self._thread == thread and self._reader is not earlier:
                exchange = self._reader  # interrupted in the return
            if exchange is not None or not request.unwritten:  # else nothing was queued
                self._give_up(exchange)
            raise
        return self._finish(exchange)

    def _withdraw(self, exchange: Exchange) -> None:
        """Withdraw a request, and wait for the server's answer to that, which gives the reason for the missing reply."""
        exchange.waits = False
        with self._lock:
            waits = self._exchanges.withdraw(exchange)
            self._flush()
        if waits:
            with suppress(TooLate, SharedRPCError):
                self._await(exchange, time.monotonic() + BRIEFLY)

    def _await(self, exchange: Exchange, deadline: float) -> None:
        """Handle the updates of an exchange until its answer arrives."""
        request = exchange.request
        while True:
            while exchange.updates:
                info = exchange.updates.popleft()
                if request.on_event is not None:
                    exchange.waits = True
                    request.on_event(info)
                    exchange.waits = False
                _seconds_until(deadline)
            if exchange.answer is not None:
                return
            try:
                if self._reader is exchange:
                    self._read_for_all(exchange, deadline)
                    continue
                wait = self._take_turn(exchange, threading.get_ident())
                if wait is not None and wait is not True:
                    self._sleep(exchange, deadline, wait)
            except BaseException:
                self._leave(exchange)
                raise

    def _read_for_all(self, exchange: Exchange, deadline: float) -> None:
        """Deliver frames until there is news for one exchange, or the connection has ended."""
        while True:
            nothing = False
            try:
                exchange.waits = True
                self._read()
                exchange.waits = False
                with self._lock:
                    self._deliver()
                    if exchange.answer is not None:
                        self._leave(exchange)
                        return
            except BlockingIOError:
                nothing = True
            except (ConnectionClosed, ProtocolError) as error:
                self._break(error)
            if nothing:  # outside the handler: a Ctrl-C in the wait is not shown with that error
                self._poll(deadline)
                exchange.waits = False
            if exchange.updates or self._exchanges.broken is not None or self._reader is not exchange:
                self._leave(exchange)
                return
            if self._socket.unsent:  # for example the release of a late answer's lease
                with self._lock:
                    self._flush()
            _seconds_until(deadline)

    def _poll(self, deadline: float) -> None:
        """Wait until the socket is ready. After a signal poll(2) is repeated with the remaining time."""
        left = _seconds_until(deadline)
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._socket.unsent else 0))
        poll.poll(min(left, _LONG) * 1000)

    def _sleep(self, exchange: Exchange, deadline: float, wait: _Sleep) -> None:
        """Wait until there is news for an exchange, or it becomes the reader.

        :raises TooLate: if the deadline comes first.
        """
        left = _seconds_until(deadline)
        exchange.waits = True
        if self._socket.written >= exchange.end:
            wait.sleep(min(left, _LONG))
            exchange.waits = False
        else:
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLOUT)
            poll.poll(min(left, _SLICE) * 1000)
            exchange.waits = False
            with self._lock:
                self._flush()
