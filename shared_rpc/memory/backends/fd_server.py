"""The server of a process's descriptors, by token.

A segment has one descriptor. If that is an export descriptor, and opening the memory needs a descriptor of the driver as well,
as for a pool, it names its maker's descriptor server and a token, known only to processes that received it.

The address is an abstract Unix socket (unix(7)), which leaves no file behind; it is visible in one network namespace.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import struct
import threading
import time

from shared_rpc.errors import CapabilityError
from shared_rpc.forks import after_fork
from shared_rpc.protocol.peers import is_own, peer_of

_log = logging.getLogger("shared_rpc")

TOKEN_BYTES = 16
#: Seconds for a client's request, and for the answer.
_ASKING, _ANSWERING = 1.0, 10.0
#: Errors of accept(2) on a listener that was closed by other code; the others, such as too many open files, pass.
_PERMANENT = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
#: Seconds after a failed accept(2).
_PAUSE = 0.1


class FdServer:
    """The descriptor server of this process, opened with the first registered descriptor."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[bytes, int] = {}
        self._listener: socket.socket | None = None
        self.address = ""

    def register(self, token: bytes, fd: int) -> None:
        """Send ``fd`` to any process of this user that has the token. The server owns the descriptor from now on.

        :raises CapabilityError: if the descriptor server cannot be opened; the descriptor is closed.
        """
        try:
            with self._lock:
                if self._listener is None:
                    self._open()
                self._left[token] = fd
        except (OSError, RuntimeError) as error:
            os.close(fd)
            raise CapabilityError(f"cannot open the socket of the descriptor server of pid {os.getpid()}: {error}") from error

    def _open(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            name = f"shared-rpc-fds-{os.getpid()}-{secrets.token_hex(8)}"
            listener.bind("\0" + name)
            listener.listen(128)
            threading.Thread(target=self._serve, args=(listener,), name="shared-rpc-fds", daemon=True).start()
        except BaseException:
            listener.close()
            raise
        self._listener, self.address = listener, name

    def withdraw(self, token: bytes) -> None:
        """Close the descriptor registered for the token."""
        with self._lock:
            fd = self._left.pop(token, -1)
        if fd >= 0:
            os.close(fd)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                asking, _ = listener.accept()
            except OSError as error:
                if error.errno in _PERMANENT:
                    _log.error("the descriptor server at %s ended: %s", self.address, error)
                    return
                _log.warning("the descriptor server at %s cannot accept a client: %s", self.address, error)
                time.sleep(_PAUSE)
                continue
            with asking:
                try:
                    self._answer(asking)
                except OSError as error:
                    _log.debug("a client of the descriptor server hung up: %s", error)

    def _answer(self, asking: socket.socket) -> None:
        if not is_own(peer_of(asking).uid):
            return
        asking.settimeout(_ASKING)
        token = asking.recv(TOKEN_BYTES + 1)
        with self._lock:
            fd = self._left.get(token)
            if fd is not None:
                socket.send_fds(asking, [b"\1"], [fd])

    def _after_fork(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for fd in self._left.values():
            os.close(fd)
        self._reset()


def fetch(address: str, token: bytes) -> int:
    """Fetch the descriptor registered for a token in another process's server; the caller owns it.

    :raises CapabilityError: if no process answers there, or it has no descriptor for the token.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(_ANSWERING)
            sock.connect("\0" + address)
            if not is_own(peer_of(sock).uid):
                raise CapabilityError(f"the descriptor server {address} belongs to another user than this process")
            sock.send(token)
            # socket.recv_fds() of Python 3.11 drops the flags.
            body, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise CapabilityError(
            f"cannot get the memory's descriptor from its maker at the abstract socket {address}: {error}; both processes must "
            f"be in one network namespace"
        ) from error
    fds: list[int] = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data[: len(data) // 4 * 4])]
    if not body or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise CapabilityError(f"the descriptor server {address} does not have this memory any more: its maker released it")
    return fds[0]


FD_SERVER = FdServer()
after_fork(FD_SERVER._after_fork)
