"""Tickets: small files with the place of an object, for a process that knows nothing else.

A ticket is no lease, and keeps nothing. It is JSON that is trusted no further than its file: it must belong to this user or
to root, with nobody else allowed to write to it, and it names a socket, whose server is checked as any other is.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Annotated, Any, Literal

import msgspec

from shared_rpc.errors import ConfigurationError, StaleHandleError, TicketError
from shared_rpc.protocol.peers import is_own_or_root, named

__all__ = ["Ticket", "TicketTensor", "read_ticket"]

_FORMAT = 1
#: Bytes. The tensors of a module with 10,000 of them take about one megabyte.
_LIMIT = 16 << 20

#: Characters of a name, and its parts: deeper tensors of an object are not listed.
_NAME, _DEPTH = 4096, 40

_Id = Annotated[str, msgspec.Meta(max_length=100)]
_Text = Annotated[str, msgspec.Meta(max_length=_NAME)]
_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class TicketTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of an object: its name there (``""`` if the object is a tensor). Shapes count elements."""

    name: _Text
    dtype: _Id
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    nbytes: _Count


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Address of an object; see :meth:`Handle.ticket` and :meth:`Client.open_ticket`.

    ``kind`` is ``"result"`` or ``"buffer"``, ``device`` is ``"cpu"`` or a GPU's UUID, ``nbytes`` are bytes, ``created_at`` is
    in Unix seconds. ``boot_id`` and ``machine_id`` identify the host, ``uid`` and ``pid`` the writer.
    ``tensors`` describes the object before an attach.
    """

    version: Literal[1] = 1
    socket_path: _Path
    server_id: _Id
    object_id: _Id
    generation: _Count
    kind: Literal["result", "buffer"]
    endpoint: _Text
    cache_key: str | None
    device: _Id
    nbytes: _Count
    tensors: tuple[TicketTensor, ...]
    boot_id: _Id
    machine_id: _Id
    uid: _Count
    pid: _Count
    created_at: float

    @classmethod
    def of(cls, value: Any, facts: Mapping[str, Any], socket_path: str) -> Ticket:
        """Make a ticket for an object, now, by this process.

        :param value: the object, for its tensors.
        :param facts: the server's description of it, see :meth:`Handle.get_object_info`.
        """
        return cls(
            socket_path=socket_path,
            server_id=facts["server_id"],
            object_id=facts["object_id"],
            generation=facts["generation"],
            kind=facts.get("kind", "result"),
            endpoint=facts["endpoint"],
            cache_key=facts["cache_key"],
            device=facts["device"],
            nbytes=facts["nbytes"],
            tensors=tuple(_tensors(value, "", {})),
            boot_id=_boot_id(),
            machine_id=_machine_id(),
            uid=os.geteuid(),
            pid=os.getpid(),
            created_at=time.time(),
        )

    def to_json(self) -> str:
        """Return the text of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def from_json(cls, text: str | bytes, what: str = "the text") -> Ticket:
        """Parse the text of a ticket, wherever that comes from.

        :param what: how to call it in errors.
        :raises TicketError: if it is none, with ``reason="malformed"``.
        """
        try:
            version = msgspec.json.decode(text, type=_Version).version
            if version != _FORMAT:
                raise TicketError(
                    f"{what} is a ticket of format {version}, but this release reads {_FORMAT}: use one release of "
                    f"shared-rpc on both sides",
                    reason="malformed",
                )
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TicketError(
                f"{what} is no complete ticket ({error}): write it again with handle.ticket(path)",
                reason="malformed",
            ) from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that no other user can read (0600). A reader meanwhile gets an earlier one or this.

        :raises ConfigurationError: if that cannot be.
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
            raise ConfigurationError(f"cannot write the ticket {name}: {error.strerror}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ticket:
        """Read the ticket in a file.

        :raises TicketError: if it cannot be read, is none, or other users may have written it; ``reason`` says which.
        """
        name = os.fspath(path)
        try:
            # Opening a pipe without a writer would block.
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                _check_file(name, os.fstat(fd))
                text = file.read(_LIMIT + 1)
        except OSError as error:
            raise TicketError(f"cannot read the ticket {name}: {error.strerror}", reason="unreadable") from error
        return cls.from_json(text, name)

    def check_here(self) -> None:
        """Return if its server may be on this host.

        :raises TicketError: if it is for another one.
        :raises StaleHandleError: if this one was started again since.
        """
        boot = _boot_id()
        if self.boot_id == boot:
            return
        if self.machine_id and self.machine_id == _machine_id():
            raise StaleHandleError(
                f"the ticket of object {self.object_id} was written before the last boot of this host, which ended the object "
                f"and its server: write another ticket",
                reason="server_changed",
            )
        raise TicketError(
            f"the ticket of object {self.object_id} is for host {self.machine_id or '?'} (boot {self.boot_id}), but this is "
            f"{_machine_id() or '?'} (boot {boot}): memory is shared within one host only",
            reason="other_host",
        )

    def check_server(self, server_id: str, socket_path: str) -> None:
        """Return if a server, which listens at ``socket_path``, is the ticket's.

        :raises TicketError: if the ticket is for another server.
        :raises StaleHandleError: if another one runs at the ticket's socket now.
        """
        if self.server_id == server_id:
            return
        if os.path.realpath(self.socket_path) == os.path.realpath(socket_path):
            raise StaleHandleError(
                f"the ticket of object {self.object_id} is of server {self.server_id}, but {server_id} now runs at "
                f"{socket_path}: write another ticket",
                reason="server_changed",
            )
        raise TicketError(
            f"the ticket of object {self.object_id} is for the server {self.server_id} at {self.socket_path}, but this is "
            f"{server_id} at {socket_path}: use Client.from_ticket(path)",
            reason="other_server",
        )


class _Version(msgspec.Struct):
    version: int


def read_ticket(ticket: Ticket | str | os.PathLike[str]) -> Ticket:
    """Return a ticket, or that of a path, once it is found to be for this host."""
    found = ticket if isinstance(ticket, Ticket) else Ticket.read(ticket)
    found.check_here()
    return found


def _check_file(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TicketError(f"the ticket {name} is no regular file", reason="unreadable")
    # The same users whose servers clients accept.
    if not is_own_or_root(status.st_uid):
        raise TicketError(
            f"the ticket {name} belongs to {named(status.st_uid)}, but this process has uid {os.geteuid()}: a ticket is for "
            f"the user who wrote it",
            reason="untrusted",
        )
    if status.st_mode & 0o022:
        raise TicketError(
            f"the ticket {name} has mode {stat.S_IMODE(status.st_mode):04o}, so other users may have written it: check it and "
            f"chmod 600",
            reason="untrusted",
        )
    if status.st_size > _LIMIT:
        raise TicketError(f"{name} has {status.st_size} bytes, but a ticket has at most {_LIMIT}", reason="malformed")


def _tensors(value: Any, name: str, seen: dict[int, Any]) -> Iterator[TicketTensor]:
    """Yield the tensors of a module, by their names in it, of containers and objects, by their paths, or the value itself.

    :param seen: containers and objects on the way, which are looked at once.
    """
    if hasattr(value, "untyped_storage"):
        yield TicketTensor(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.nbytes)
    elif hasattr(value, "named_parameters"):
        begin = f"{name}." if name else ""
        for own, tensor in (*value.named_parameters(remove_duplicate=False), *value.named_buffers(remove_duplicate=False)):
            yield from _tensors(tensor, begin + own, seen)
    elif id(value) not in seen and name.count(".") < _DEPTH:
        seen[id(value)] = value
        begin = f"{name}." if name else ""
        for key, part in _parts(value):
            yield from _tensors(part, f"{begin}{key}"[:_NAME], seen)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a value, by name. Functions and classes are not looked into."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple, set, frozenset)):
        return enumerate(value)
    if isinstance(value, MethodType):
        return (("__self__", value.__self__),)
    if isinstance(value, partial):
        return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, (type, ModuleType, FunctionType)):
        return ()
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    return [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name)) for name in slots if hasattr(value, name))]


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _boot_id() -> str:
    """Return the kernel's own name for the time since it was started; containers of one host have one."""
    return _line("/proc/sys/kernel/random/boot_id")


def _machine_id() -> str:
    """Return the installation's name, see machine-id(5); ``""`` where it has none. Containers have their own."""
    return _line("/etc/machine-id")


def _line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(100).decode(errors="replace").strip()
    except OSError:
        return ""
