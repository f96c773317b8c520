"""Everything shared_rpc raises on purpose.

::

    SharedRPCError
    ├── ConfigurationError      an option, a variable or a path is wrong
    ├── ConnectError            no server answers at the socket          (also ConnectionError)
    ├── ConnectionClosed        the other side went away                 (also ConnectionError)
    ├── DeadlineExceeded        the caller's time ran out                (also TimeoutError)
    ├── ProtocolError           the other side does not speak the protocol
    │   └── SegmentNotFound     a call names memory that the server does not keep
    ├── CodecError              a value could not be taken apart or rebuilt
    ├── CapabilityError         a payload or a device that cannot be shared
    ├── EndpointNotFound        no endpoint of that name                 (also LookupError)
    ├── BufferNotFound          no buffer of that id, or not any more    (also LookupError)
    ├── CheckpointError         a file of weights is damaged             (also ValueError)
    ├── RefreshError            a refresh that was invalidated or overtaken
    ├── UpdateInterrupted       memory was left half-written by an update
    ├── StateMismatchError      a model does not fit the tensors it is to be built around
    ├── TicketError             a ticket that cannot be used here
    ├── RemoteError             an endpoint raised what cannot be rebuilt here
    ├── TaskError               a task, or its result, is not to be had
    │   └── TaskCancelled       it was cancelled
    ├── WorkerCrashed           the process that ran an endpoint has ended
    ├── StaleHandleError        the server no longer owns the object
    └── ServerBusy              a limit of the server is reached

Each class owns the code that stands for it on the wire. An exception that an endpoint raised is not
in this tree: it arrives with its own type, see :func:`from_wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

__all__ = [
    "BufferNotFound",
    "CapabilityError",
    "CheckpointError",
    "CodecError",
    "ConfigurationError",
    "ConnectError",
    "ConnectionClosed",
    "DeadlineExceeded",
    "EndpointNotFound",
    "ProtocolError",
    "RefreshError",
    "RemoteError",
    "RemoteTraceback",
    "SegmentNotFound",
    "ServerBusy",
    "SharedRPCError",
    "StaleHandleError",
    "StateMismatchError",
    "TaskCancelled",
    "TaskError",
    "TicketError",
    "UpdateInterrupted",
    "WorkerCrashed",
]


class SharedRPCError(Exception):
    """The root: ``except SharedRPCError`` catches all that this library raises itself."""

    code: ClassVar[str] = "error"
    #: Of an error that came from a server: what the server's log calls the request by. An exception that an endpoint raised
    #: has the same attribute.
    request_id: str = ""

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> SharedRPCError:
        """The error as it was, from what :meth:`detail` put on the wire."""
        return cls(message)

    def detail(self) -> dict[str, str]:
        """What this class carries beside its message."""
        return {}

    def __reduce__(self) -> tuple[Callable[..., SharedRPCError], tuple[str, dict[str, str]]]:
        # An exception with keyword-only arguments would break the pool that brings it from a child process.
        _, message, detail = _parts(self)
        return type(self).restore, (message, detail)


class ConfigurationError(SharedRPCError):
    """An option, an environment variable or a path cannot be used as it is."""

    code = "configuration"


class ConnectError(SharedRPCError, ConnectionError):
    """No server answers at the socket."""

    code = "connect"


class ConnectionClosed(SharedRPCError, ConnectionError):
    """The connection ended before the reply came; what was asked may or may not have been done.

    The clients repeat by themselves what was not sent in full, and what only asks.
    """

    code = "connection-closed"


class DeadlineExceeded(SharedRPCError, TimeoutError):
    """The caller's timeout passed. The server was told; other waiters of the same run go on."""

    code = "deadline-exceeded"


class ProtocolError(SharedRPCError):
    """Bytes or file descriptors that the protocol does not allow."""

    code = "protocol"


class SegmentNotFound(ProtocolError):
    """A call names memory that the server does not keep, or not any more: the library's own client sends it then.

    ``segments`` are the ids that mean nothing to the server.
    """

    code = "segment-not-found"

    def __init__(self, message: str, segments: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.segments = tuple(segments)

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> SegmentNotFound:
        """See :meth:`SharedRPCError.restore`."""
        return cls(message, detail.get("segments", "").split())

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {"segments": " ".join(self.segments)}


class CodecError(SharedRPCError):
    """A value could not be pickled or rebuilt; the message names the attribute path."""

    code = "codec"


class CapabilityError(SharedRPCError):
    """A payload or a device that cannot be shared; the message names it and says what can."""

    code = "capability"


class EndpointNotFound(SharedRPCError, LookupError):
    """The server has no endpoint of that name."""

    code = "endpoint-not-found"


class BufferNotFound(SharedRPCError, LookupError):
    """The server hands out no buffer of that id, or not any more. Those who hold it keep it.

    ``reason`` is ``"unknown"``, ``"freed"``, ``"expired"`` (its ``ttl``), ``"exhausted"`` (its ``max_accesses``) or
    ``"released"`` (its last lease has ended).
    """

    code = "buffer-not-found"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> BufferNotFound:
        """See :meth:`SharedRPCError.restore`."""
        return cls(message, reason=detail.get("reason", "unknown"))

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {"reason": self.reason}


class CheckpointError(SharedRPCError, ValueError):
    """A file of weights is truncated, damaged, or not of its format. The message names the file, and the tensor."""

    code = "checkpoint"


class RefreshError(SharedRPCError):
    """A generation was built and not made current: its call was invalidated meanwhile, or a later refresh was sooner."""

    code = "refresh"


class UpdateInterrupted(SharedRPCError):
    """An update in place began and did not end, so the memory is partly old and partly new, until a later update ends.

    ``revision`` is the odd one that was left, ``pid`` the process that wrote, in its own pid namespace.
    """

    code = "update-interrupted"

    def __init__(self, message: str, *, revision: int, pid: int) -> None:
        super().__init__(message)
        self.revision = revision
        self.pid = pid

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> UpdateInterrupted:
        """See :meth:`SharedRPCError.restore`."""
        return cls(message, revision=int(detail.get("revision", "1")), pid=int(detail.get("pid", "0")))

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {"revision": str(self.revision), "pid": str(self.pid)}


class StateMismatchError(SharedRPCError):
    """A model cannot be built around tensors that are there; the message lists what does not fit, up to a length.

    ``missing`` has all names that the model has and the source has not, ``unexpected`` those that only the source has, and
    ``mismatched`` a text for each that differs in shape or dtype.
    """

    code = "state-mismatch"

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> StateMismatchError:
        """See :meth:`SharedRPCError.restore`."""
        # A detail may have more in it, as every one has that a server sent.
        names = ("missing", "unexpected", "mismatched")
        return cls(message, **{name: detail[name].split("\n") for name in names if detail.get(name)})

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {name: "\n".join(getattr(self, name)) for name in ("missing", "unexpected", "mismatched")}


class TicketError(SharedRPCError):
    """A ticket that cannot be used here; the message names the file and says what to do.

    ``reason`` is ``"unreadable"`` (no such file, or none that may be read), ``"untrusted"`` (others may have written it),
    ``"malformed"``, ``"other_host"``, or ``"other_server"``: the client is connected to another one than the ticket's.
    """

    code = "ticket"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> TicketError:
        """See :meth:`SharedRPCError.restore`."""
        return cls(message, reason=detail.get("reason", "malformed"))

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {"reason": self.reason}


class ServerBusy(SharedRPCError):
    """A limit of the server is reached; the message names the limit."""

    code = "server-busy"


class WorkerCrashed(SharedRPCError):
    """The process that ran an endpoint has ended, or cannot be had.

    ``signal`` is the name of the signal that ended it, ``"SIGSEGV"`` for instance, and ``exit_code`` what it exited with;
    either is None where it does not apply. ``stderr`` holds the last lines that it wrote to its standard error.
    """

    code = "worker-crashed"

    def __init__(self, message: str, *, signal: str | None = None, exit_code: int | None = None, stderr: str = "") -> None:
        super().__init__(message)
        self.signal = signal
        self.exit_code = exit_code
        self.stderr = stderr

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> WorkerCrashed:
        """See :meth:`SharedRPCError.restore`."""
        code = detail.get("exit_code", "")
        return cls(
            message,
            signal=detail.get("signal") or None,
            exit_code=int(code) if code.removeprefix("-").isdecimal() else None,
            stderr=detail.get("stderr", ""),
        )

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {
            "signal": self.signal or "",
            "exit_code": "" if self.exit_code is None else str(self.exit_code),
            "stderr": self.stderr,
        }


class StaleHandleError(SharedRPCError):
    """The handle's object is no longer owned by the server that issued it.

    ``reason`` is ``"released"``, ``"object_gone"``, ``"server_changed"`` or ``"server_unreachable"``; of ``latest()`` also
    ``"invalidated"``, of ``open_ticket()`` also ``"superseded"``. Tensors taken from the handle stay valid: their memory is
    held by this process.
    """

    code = "stale-handle"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> StaleHandleError:
        """See :meth:`SharedRPCError.restore`."""
        return cls(message, reason=detail.get("reason", "object_gone"))

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {"reason": self.reason}


class TaskError(SharedRPCError):
    """A task, or its result, is not to be had.

    ``reason`` is ``"unknown"``, ``"expired"``, ``"unfinished"``, ``"released"`` or ``"cancelled"``.
    """

    code = "task"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> TaskError:
        """See :meth:`SharedRPCError.restore`."""
        return cls(message, reason=detail.get("reason", "unknown"))

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {"reason": self.reason}


class TaskCancelled(TaskError):
    """The task was cancelled. In an endpoint, :func:`shared_rpc.raise_if_cancelled` raises it."""

    code = "task-cancelled"

    def __init__(self, message: str = "the task was cancelled", *, reason: str = "cancelled") -> None:
        super().__init__(message, reason=reason)


class RemoteError(SharedRPCError):
    """An endpoint raised something that has no counterpart here.

    ``type_name`` is the qualified name of its type, ``message`` its text, ``traceback`` the remote traceback.
    """

    code = "remote"

    def __init__(self, message: str, *, type_name: str, traceback: str = "") -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> RemoteError:
        """See :meth:`SharedRPCError.restore`."""
        return cls(message, type_name=detail.get("type_name", "Exception"), traceback=detail.get("traceback", ""))

    def detail(self) -> dict[str, str]:
        """See :meth:`SharedRPCError.detail`."""
        return {"type_name": self.type_name, "traceback": self.traceback}


class RemoteTraceback(Exception):
    """The cause of an exception that crossed a process: shows where it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\nin the server:\n{self.text}"


def _tree(root: type[SharedRPCError]) -> dict[str, type[SharedRPCError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


#: Beside the tree, a call that does not fit the endpoint's signature is a TypeError, as it is for a plain function.
_BY_CODE: dict[str, type[SharedRPCError] | type[TypeError]] = {**_tree(SharedRPCError), "signature": TypeError}


def to_wire(error: BaseException) -> tuple[str, str, dict[str, str]]:
    """``(code, message, detail)`` of an error that the library itself raised. Never raises."""
    code, message, detail = _parts(error)
    return code, sendable(message), {name: sendable(text) for name, text in detail.items()}


def text_of(error: BaseException) -> str:
    """``str(error)``, also of an error whose ``__str__`` fails, be it with SystemExit."""
    try:
        return str(error)
    except BaseException as problem:
        return f"<its __str__ raised {type(problem).__name__}>"


#: Characters. A longer text is cut in the middle: it must fit a frame, and somebody must read it.
_TEXT_LIMIT = 1 << 16


def sendable(text: str) -> str:
    """A text as MessagePack takes it, and of bounded length."""
    if len(text) > _TEXT_LIMIT:
        half = _TEXT_LIMIT // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    # A file name that is not UTF-8 has surrogates (PEP 383), and MessagePack takes none.
    return text.encode("utf-8", "backslashreplace").decode()


def _parts(error: BaseException) -> tuple[str, str, dict[str, str]]:
    if isinstance(error, RemoteError):
        return error.code, error.message, error.detail()
    if isinstance(error, SharedRPCError):
        return error.code, text_of(error), error.detail()
    if isinstance(error, TypeError):
        return "signature", text_of(error), {}
    return SharedRPCError.code, f"{type(error).__name__}: {text_of(error)}", {}


def class_of(code: str) -> type[SharedRPCError] | type[TypeError]:
    """The class of a wire code; the root for one that is not known here."""
    return _BY_CODE.get(code, SharedRPCError)


def from_wire(code: str, message: str, detail: dict[str, str]) -> Exception:
    """The error that :func:`to_wire` took apart; an unknown code gives the root class."""
    kind = class_of(code)
    if issubclass(kind, SharedRPCError):
        return kind.restore(message, detail)
    return kind(message)
