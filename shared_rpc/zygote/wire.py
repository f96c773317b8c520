"""Messages on a zygote's sockets: JSON with a length prefix, descriptors with the first bytes.

They stay on this host and in this version of the package. A message is an object, and ``type`` says which one:

=================  ======================================================================================================
``Preload``        to a broker's zygote, first: ``modules`` and ``own``, see
                   :meth:`~shared_rpc.zygote.serving.Zygote.prepare`; answered with ``Ready`` (the number of
                   ``modules``, ``dropped``, and the ``variables`` that the imports have set) or ``Unfit`` (``why``, and the
                   ``module`` whose import was the reason)
``Greeting``       to each client. Descriptors are sent after it: those sent to a stopped process stay open for as long
``Fork``           to a fork of the zygote, which becomes the watcher of the requested process: see
                   :class:`~shared_rpc.zygote.serving.Fork`; answered with ``Forked`` (``pid``) or ``ForkRefused`` (``why``;
                   ``stale`` if any later request would be refused too). The process begins when it receives :data:`GO`
``Ended``          from the watcher, last: ``code`` as :attr:`subprocess.Popen.returncode`
``TellState``      answered with ``ZygoteState``, see :meth:`shared_rpc.zygote.serving.Listener.answer`
=================  ======================================================================================================

A command of ``shared-rpc run`` loads this module: its start is visible to the user, so neither msgspec nor asyncio is imported.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from shared_rpc.errors import ConnectError
from shared_rpc.protocol.peers import foreign_owner, is_own, named, peer_of

#: Maximum bytes of a message: execve(2) takes less.
_LIMIT = 1 << 25
_LENGTH = 4
#: The kernel's limit of descriptors of one sendmsg(2), SCM_MAX_FD.
_FDS = 253
#: The last argument of a process that changes its command line: a new one must fit into the memory of the old one.
PADDING = "x" * 2000
#: The byte that lets a process run which has reported that it is ready.
GO = b"!"


class Lost(Exception):
    """A message that did not arrive completely."""


def framed(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message."""
    data = json.dumps(message).encode()
    return len(data).to_bytes(_LENGTH, "big") + data


GREETING = framed({"type": "Greeting"})


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send a frame, and descriptors with it.

    :raises ConnectError: for more descriptors than one message takes.
    :raises OSError: that of the socket, including TimeoutError.
    """
    if len(fds) > _FDS:
        raise ConnectError(f"the process has {len(fds)} descriptors to pass on, and a zygote takes {_FDS}")
    sent = socket.send_fds(sock, [data[:1]], fds) if fds else 0
    sock.sendall(data[sent:])


def receive_fds(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int], int]:
    """Receive bytes and descriptors, which are close-on-exec, and the flags: socket.recv_fds() of Python 3.11 requests none."""
    data, ancillary, flags, _ = sock.recvmsg(nbytes, socket.CMSG_LEN(most * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist(), flags


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a message; return it and its descriptors, which the caller owns.

    :raises Lost: if the peer hung up, or its message could not be received completely.
    :raises OSError: that of the socket, including TimeoutError.
    """
    fds: list[int] = []
    try:
        length = int.from_bytes(_exactly(sock, _LENGTH, fds), "big")
        if length > _LIMIT:
            raise Lost(f"a message of {length} bytes: the limit is {_LIMIT}")
        message = _message(_exactly(sock, length, fds))
        if not isinstance(message, dict) or "type" not in message:
            raise Lost("received bytes that are no message")
        return message, fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _message(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _exactly(sock: socket.socket, size: int, fds: list[int]) -> bytes:
    data = b""
    while len(data) < size:
        part, more, flags = receive_fds(sock, min(size - len(data), 1 << 16), _FDS)
        fds += more
        if flags & socket.MSG_CTRUNC:
            raise Lost("file descriptors were lost: too many are open in this process (RLIMIT_NOFILE, ulimit -n)")
        if not part:
            raise Lost("the other side hung up")
        data += part
    return data


def connect(path: str, seconds: float) -> socket.socket | None:
    """Connect to the zygote that listens at a path; return None if there is none.

    :param seconds: the timeout of the socket.
    :raises ConnectError: if the link or the process there is another user's, or it cannot be connected to.
    """
    if os.path.islink(path) and (owner := foreign_owner(path)) is not None:
        raise ConnectError(f"{path} is a link of another user ({named(owner)})")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The kernel waits for a full backlog; it admits thousands.
        connection.settimeout(seconds)
        connection.connect(path)
        peer = peer_of(connection)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise ConnectError(f"cannot connect to {path}: {error}") from None
    if not is_own(peer.uid):
        connection.close()
        raise ConnectError(f"pid {peer.pid} of another user ({named(peer.uid)}) listens at {path}")
    return connection


def ask(sock: socket.socket, request: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
    """Send a request after the zygote's greeting; return the answer, or the message sent instead of the greeting.

    :raises Lost, OSError: like :func:`receive`.
    """
    first, _ = receive(sock)
    if first["type"] != "Greeting":
        return first
    send(sock, framed(request), fds)
    return receive(sock)[0]


def code_of_ended(connection: socket.socket) -> int:
    """Wait for the last message of a watcher; return the exit code, or the negative number of the signal."""
    try:
        return int(receive(connection)[0]["code"])
    except (Lost, OSError):  # the watcher was killed, and the process with it
        return -signal.SIGKILL
