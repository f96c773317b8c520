"""Tickets: small files with the address of an object, sufficient for a process to get it.

A ticket is not a lease, and keeps nothing alive. It is JSON, trusted only as far as its file: that must belong to this user or
to root, not be writable by any other user, and it names a socket, whose server is checked like any other.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec

from shared_rpc.errors import ConfigurationError, StaleHandleError, TicketError
from shared_rpc.protocol.own_files import file_problem

#: Maximum bytes. Only a cache key can be long: a template may put a whole argument into it.
_LIMIT = 1 << 20

_Id = Annotated[str, msgspec.Meta(max_length=100)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Address of an object; see :meth:`Handle.ticket` and :meth:`Client.open_ticket`.

    ``kind`` is ``"result"`` or ``"buffer"``. The ``endpoint`` is for readers of the file.
    """

    version: Literal[2] = 2
    socket_path: _Path
    server_id: _Id
    object_id: _Id
    kind: Literal["result", "buffer"]
    endpoint: _Text
    cache_key: str | None

    @classmethod
    def of(cls, facts: Mapping[str, Any], socket_path: str) -> Ticket:
        """Make a ticket for an object.

        :param facts: the server's description of it, see :meth:`Handle.get_object_info`.
        """
        return cls(
            socket_path=socket_path,
            server_id=facts["server_id"],
            object_id=facts["object_id"],
            kind=facts.get("kind", "result"),
            endpoint=facts["endpoint"],
            cache_key=facts["cache_key"],
        )

    def to_json(self) -> str:
        """Return the text of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def from_json(cls, text: str | bytes, what: str = "the text") -> Ticket:
        """Parse the text of a ticket, from any source.

        :param what: its name in errors.
        :raises TicketError: if it is invalid, with ``reason="malformed"``.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TicketError(
                f"{what} is no complete ticket of this release ({error}): write it again with handle.ticket(path)",
                reason="malformed",
            ) from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that no other user can read (0600). A concurrent reader gets either the earlier one or this one.

        :raises ConfigurationError: if the file cannot be written.
        """
        name = os.fspath(path)
        draft = f"{name}.{secrets.token_hex(4)}.part"
        try:
            try:
                fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                with open(fd, "w", encoding="utf-8") as file:
                    os.fchmod(fd, 0o600)
                    file.write(self.to_json())
                    file.flush()
                    os.fsync(fd)
                os.replace(draft, name)
            except BaseException:
                with suppress(OSError):
                    os.unlink(draft)
                raise
        except OSError as error:
            if error.errno is None:  # a signal handler's own
                raise
            raise ConfigurationError(f"cannot write the ticket {name}: {error.strerror}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ticket:
        """Read the ticket in a file.

        :raises TicketError: if it cannot be read, is invalid, or may have been written by other users; see its ``reason``.
        """
        name = os.fspath(path)
        try:
            # Opening a pipe without a writer would block.
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                _check_file(name, os.fstat(fd))
                text = file.read(_LIMIT + 1)
        except OSError as error:
            if error.errno is None:  # a signal handler's own
                raise
            raise TicketError(f"cannot read the ticket {name}: {error.strerror}", reason="unreadable") from error
        return cls.from_json(text, name)

    def check_server(self, server_id: str, socket_path: str) -> None:
        """Check that a server, which listens at ``socket_path``, is the ticket's.

        :raises TicketError: if the ticket is for another server.
        :raises StaleHandleError: if another one runs at the ticket's socket now.
        """
        if self.server_id == server_id:
            return
        if os.path.realpath(self.socket_path) == os.path.realpath(socket_path):
            raise StaleHandleError(
                f"the ticket of object {self.object_id} is for server {self.server_id}, which has ended or is on another host: "
                f"{server_id} now runs at {socket_path}; write another ticket",
                reason="server_changed",
            )
        raise TicketError(
            f"the ticket of object {self.object_id} is for the server {self.server_id} at {self.socket_path}, but this is "
            f"{server_id} at {socket_path}: use Client.from_ticket(path)",
            reason="other_server",
        )


def read_ticket(ticket: Ticket | str | os.PathLike[str]) -> Ticket:
    """Return a ticket, or the one in a file."""
    return ticket if isinstance(ticket, Ticket) else Ticket.read(ticket)


def _check_file(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TicketError(f"the ticket {name} is no regular file", reason="unreadable")
    if why := file_problem(status):
        raise TicketError(f"the ticket {name} {why}: write another one, or check it and chmod 600", reason="untrusted")
    if status.st_size > _LIMIT:
        raise TicketError(f"{name} has {status.st_size} bytes, but a ticket has at most {_LIMIT}", reason="malformed")
