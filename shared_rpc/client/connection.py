"""One blocking connection of a client: a handshake, then requests, one at a time."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import socket
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shared_rpc.client.operations import Reply, Request
from shared_rpc.errors import (
    ConnectError,
    ConnectionClosed,
    DeadlineExceeded,
    ProtocolError,
    RemoteTraceback,
    from_wire,
)
from shared_rpc.transport import FrameSocket, peer_of
from shared_rpc.wire import messages as m
from shared_rpc.wire.frames import Frame
from shared_rpc.wire.messages import decode_message

__all__ = ["Connection", "raise_error"]

_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
#: Seconds a server has for the handshake, and for answering a cancellation.
_PROMPT = 5.0
#: Request ids have 32 bits, begin again after the last one, and 0 is the server's own.
_IDS = (1 << 32) - 1


class Connection:
    """A connected, welcomed socket.

    :raises ConnectError: if nobody answers at ``path``, or somebody else's process does.
    """

    def __init__(self, path: str, token: str, timeout: float) -> None:
        self.path = path
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket = FrameSocket(sock)
        _open.add(self)
        self._ids = itertools.count()
        self._usable = True
        try:
            self._socket.limit(min(timeout, _PROMPT))
            self._connect(sock)
            self.welcome = self._greet(token, time.monotonic() + min(timeout, _PROMPT))
        except BaseException:
            self.close()
            raise

    def _connect(self, sock: socket.socket) -> None:
        try:
            sock.connect(self.path)
        except OSError as error:
            reason = "no server listens there" if error.errno in (errno.ENOENT, errno.ECONNREFUSED) else str(error)
            raise ConnectError(f"cannot connect to {self.path}: {reason}") from error
        uid = peer_of(sock).uid
        if uid not in (os.geteuid(), 0):
            raise ConnectError(f"the server at {self.path} belongs to uid {uid}, not to you (uid {os.geteuid()})")

    def _greet(self, token: str, deadline: float) -> m.Welcome:
        try:
            self._socket.queue(m.Hello(token), 0)
            self._send(deadline)
            frame = self._receive(deadline)
        except TimeoutError as error:
            raise ConnectError(f"the server at {self.path} does not answer") from error
        except ConnectionClosed as error:
            raise ConnectError(f"the server at {self.path} hung up: {error}") from error
        welcome = self._message(frame)
        if not isinstance(welcome, m.Welcome):
            raise ProtocolError(f"the server at {self.path} greets with {type(welcome).__name__}")
        return welcome

    def _message(self, frame: Frame) -> m.Message:
        try:
            message = decode_message(frame)
            if isinstance(message, m.Error):
                raise_error(message, frame)
            return message
        except BaseException:
            frame.close()
            raise

    def _send(self, deadline: float) -> None:
        self._limit(deadline)
        # A server that hung up may have said why, and that is still to be read.
        with suppress(ConnectionClosed):
            while not self._socket.flush():
                self._limit(deadline)

    def _receive(self, deadline: float) -> Frame:
        while (frame := self._socket.next_frame()) is None:
            self._limit(deadline)
            with suppress(BlockingIOError):  # the limit passed, perhaps a little before the deadline
                self._socket.receive()
        return frame

    def _limit(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.limit(left)

    def exchange(self, request: Request, deadline: float) -> Reply:
        """Send a request and wait for its reply until ``deadline`` (time.monotonic()).

        :raises DeadlineExceeded: in time; the connection stays good, because the server was told and has answered.
        :raises ConnectionClosed: if the server goes away.
        """
        number = next(self._ids) % _IDS + 1
        self._usable = False
        try:
            self._socket.queue(request.message, number, request.payload, request.fds)
            self._send(deadline)
            frame = self._await_reply(number, deadline)
        except TimeoutError:
            frame = self._give_up(request, number)
        self._usable = True
        return Reply(self._message(frame), frame)

    def _await_reply(self, number: int, deadline: float) -> Frame:
        while True:
            frame = self._receive(deadline)
            if frame.request_id == number:
                return frame
            if frame.request_id == 0:  # the server's last word to this connection
                self._message(frame)
            frame.close()

    def _give_up(self, request: Request, number: int) -> Frame:
        """Tell the server; its answer is either that it knows, or the reply, which came just in time."""
        prompt = time.monotonic() + _PROMPT
        try:
            self._socket.queue(m.Cancel(), number)
            self._send(prompt)
            frame = self._await_reply(number, prompt)
        except TimeoutError:
            raise DeadlineExceeded(f"{request.what} was not answered in time, and the server at {self.path} is stuck") from None
        if isinstance(message := decode_message(frame), m.Error) and message.code == DeadlineExceeded.code:
            frame.close()
            self._usable = True
            raise DeadlineExceeded(
                f"{request.what} took longer than its timeout; a run that has begun goes on in the server, and a later "
                f"identical call joins it or finds its result"
            )
        return frame

    @property
    def usable(self) -> bool:
        """Whether the last exchange left the connection in order."""
        return self._usable

    @property
    def alive(self) -> bool:
        """Whether the server still holds the other end, as far as this one can tell without asking."""
        if self._socket.fileno() < 0:
            return False
        try:
            self._socket.sock.recv(1, _PEEK)
        except BlockingIOError:
            return True  # nothing to read, not even the end
        except OSError:
            return False
        return False

    def hang_up(self) -> None:
        """End the connection under a thread that waits on it, whose it is to :meth:`close` it."""
        with suppress(OSError):  # the server was first
            self._socket.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give up the descriptor."""
        self._socket.close()


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork() -> None:
    # Closing the child's copies does not end the parent's session, and keeping them would outlive it: also that of a
    # connection which another thread was just making.
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_after_fork)


def _native(error: Any, type_name: str) -> Any:
    """The exception with this process's own class of that name, where the script that defines it runs here as well.

    Classes of a script travel as code, and ``except`` knows a class by its identity, not by its name.
    """
    module = type(error).__module__
    script = sys.modules.get("__main__")
    here = module in ("__main__", Path(getattr(script, "__file__", None) or "").stem)
    found: Any = script if here else sys.modules.get(module)
    for name in type_name.removeprefix(f"{module}.").split("."):
        found = getattr(found, name, None)
    if isinstance(found, type) and issubclass(found, Exception) and found is not type(error):
        with suppress(TypeError):  # another class altogether
            error.__class__ = found
    return error


def raise_error(message: m.Error, frame: Frame) -> NoReturn:
    """Raise what an error reply stands for: an endpoint's own exception where it can be rebuilt, with the remote
    traceback as its cause; else the library's.
    """
    error = from_wire(message.code, message.text, message.detail)
    cause = RemoteTraceback(message.detail["traceback"]) if message.detail.get("traceback") else None
    if message.endpoint_raised:
        try:
            own = _native(pickle.loads(frame.payload), message.detail["type_name"])
        except Exception:
            own = None  # its class is not here, or its constructor takes other arguments: RemoteError tells all of it
        if isinstance(own, Exception):
            raise own from cause
    raise error from cause
