"""The protocols of a service manager, sd_listen_fds(3) and sd_notify(3), without their library.

The manager's listening sockets and stored descriptors have numbers from 3 on, with a name for each in ``LISTEN_FDNAMES``.
Messages to it are datagrams with lines of ``NAME=value``, and a descriptor to store is attached (SCM_RIGHTS). It sends no
replies, and silently drops what it refuses, such as more descriptors than ``FileDescriptorStoreMax``.
"""

from __future__ import annotations

import array
import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared_rpc.errors import ConfigurationError

_log = logging.getLogger("shared_rpc.broker")

#: The first passed descriptor: SD_LISTEN_FDS_START.
_FIRST = 3
#: A timeout of 1 s for a message when the manager's queue is full.
_PATIENCE = struct.pack("ll", 1, 0)
#: sd_notify(3), FDNAME=: the manager refuses longer names, and characters other than printable ASCII without colons.
_NAME_LIMIT = 255


class Passed(NamedTuple):
    """A descriptor passed by the manager, and its name."""

    name: str
    fd: int


class Notifier:
    """The connection to the service manager, if any; otherwise nothing is sent. Thread-safe.

    :param address: ``NOTIFY_SOCKET``: a path, or with a leading ``@`` a name in the abstract namespace; ``""`` for none.
    """

    def __init__(self, address: str = "") -> None:
        self.there = bool(address)
        if address and address[0] not in "/@":
            raise ConfigurationError(f"NOTIFY_SOCKET={address!r}: neither a path nor an abstract Unix socket ('@…')")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        if self.there:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)

    def notify(self, *lines: str, fd: int | None = None) -> None:
        """Send lines, and a borrowed descriptor. Failures are only logged."""
        if not self.there:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        try:
            self._socket.sendmsg(["\n".join(lines).encode()], rights, socket.MSG_NOSIGNAL, self._address)
        except OSError as error:
            _log.warning("cannot send %s to the service manager: %s", " ".join(lines), error)

    def ready(self, status: str) -> None:
        """Report the completion of the start or of a reload."""
        self.notify("READY=1", f"STATUS={status}")

    def store(self, name: str, fd: int) -> None:
        """Store a duplicate of a borrowed descriptor in the manager, for the next process of the service.

        :param name: at most 255 characters, printable ASCII without a colon.
        """
        assert name.isascii() and name.isprintable() and ":" not in name and 0 < len(name) <= _NAME_LIMIT, name
        # By default, the manager drops a descriptor that polls as hung up, which a GPU driver's may.
        self.notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fd=fd)

    def remove(self, name: str) -> None:
        """Have the manager close the descriptors stored under a name."""
        self.notify("FDSTOREREMOVE=1", f"FDNAME={name}")


@dataclass
class Inherited:
    """The sockets and descriptors passed to a broker at its start; none without a service manager.

    :param listeners: listening sockets not yet used by a provider, by path.
    :param stored: descriptors stored in the manager by an earlier process of the service. Their receiver owns them.
    :param capacity: the manager's limit of descriptors, None if it does not report that.
    """

    listeners: dict[str, socket.socket] = field(default_factory=dict)
    stored: list[Passed] = field(default_factory=list)
    notifier: Notifier = field(default_factory=Notifier)
    capacity: int | None = None


def inherit(variables: Mapping[str, str]) -> Inherited:
    """Take the descriptors passed to this process.

    :param variables: those of the environment, see :func:`shared_rpc.settings.take_service_variables`.
    :raises ConfigurationError: for a passed socket or descriptor that no broker can use, naming it.
    """
    capacity = variables.get("FDSTORE", "")
    found = Inherited(
        notifier=Notifier(variables.get("NOTIFY_SOCKET", "")), capacity=int(capacity) if capacity.isdecimal() else None
    )
    for passed in _passed(variables):
        if stat.S_ISSOCK(os.fstat(passed.fd).st_mode):
            listener = _listener(passed)
            found.listeners[listener.getsockname()] = listener
        else:
            found.stored.append(passed)
    return found


def _passed(variables: Mapping[str, str]) -> list[Passed]:
    if variables.get("LISTEN_PID") != str(os.getpid()):  # they were passed to another process
        return []
    text = variables.get("LISTEN_FDS", "")
    count = int(text) if text.isdecimal() else 0
    names = variables.get("LISTEN_FDNAMES", "").split(":")
    passed = []
    for index in range(count):
        fd = _FIRST + index
        try:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"LISTEN_FDS={text}, but descriptor {fd} is not open: {error}") from error
        passed.append(Passed(names[index] if index < len(names) else "", fd))
    return passed


def _listener(passed: Passed) -> socket.socket:
    sock = socket.socket(fileno=passed.fd)
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    address = sock.getsockname() if sock.family == socket.AF_UNIX else ""
    if sock.type != socket.SOCK_STREAM or not listens or not isinstance(address, str) or not address:
        sock.close()
        raise ConfigurationError(
            f"the service manager's socket {passed.name!r} is no listening Unix stream socket: use ListenStream= with a path"
        )
    sock.setblocking(False)
    return sock
