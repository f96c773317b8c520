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
    ├── SignatureError          arguments do not fit the endpoint        (also TypeError)
    ├── BufferNotFound          no buffer of that id, or not any more    (also LookupError)
    ├── CheckpointError         a file of weights is damaged             (also ValueError)
    ├── RefreshError            a refresh that was invalidated or overtaken
    ├── ChannelClosed           the other side of a channel has closed it, or has ended
    ├── UpdateInterrupted       memory was left half-written by an update
    ├── StateMismatchError      a model does not fit the tensors it is to be built around
    ├── TicketError             a ticket that cannot be used here
    ├── RecordError             an exported record that cannot be adopted here
    ├── RemoteError             an endpoint's exception that cannot be rebuilt here
    ├── TaskError               a task, or its result, is not available
    │   └── TaskCancelled       it was cancelled
    ├── WorkerCrashed           the process that ran an endpoint has ended
    ├── ClusterError            the source of records, or the cluster behind it, has failed
    ├── StaleHandleError        the server no longer owns the object
    ├── HandleSuspended         the handle's memory is not mapped, until it is resumed
    └── ServerBusy              a limit of the server is reached

Each class owns the code that stands for it on the wire. An exception that an endpoint raised is not
in this tree: it arrives with its own type, see :func:`from_wire`.
"""

from __future__ import annotations

import copyreg
import functools
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, cast

__all__ = [
    "BufferNotFound",
    "CapabilityError",
    "ChannelClosed",
    "CheckpointError",
    "ClusterError",
    "CodecError",
    "ConfigurationError",
    "ConnectError",
    "ConnectionClosed",
    "DeadlineExceeded",
    "EndpointNotFound",
    "HandleSuspended",
    "ProtocolError",
    "RecordError",
    "RefreshError",
    "RemoteError",
    "RemoteTraceback",
    "SegmentNotFound",
    "ServerBusy",
    "SharedRPCError",
    "SignatureError",
    "StaleHandleError",
    "StateMismatchError",
    "TaskCancelled",
    "TaskError",
    "TicketError",
    "UpdateInterrupted",
    "WorkerCrashed",
]


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return "\n".join(value)
    return "" if value is None else str(value)


def _or(default: str | None) -> Callable[[str], str | None]:
    return lambda text: text or default


def _lines(text: str) -> list[str]:
    return text.split("\n") if text else []


def _int_or(default: int | None) -> Callable[[str], int | None]:
    return lambda text: int(text) if text.removeprefix("-").isdecimal() else default


class SharedRPCError(Exception):
    """The root: ``except SharedRPCError`` catches every error raised by this library itself."""

    code: ClassVar[str] = "error"
    #: For an error from a server: the request's id in the server's log. An exception raised by an endpoint has the same
    #: attribute.
    request_id: str = ""

    #: Attributes apart from the message, each with the function that decodes it; an absent one is decoded from an empty text.
    _FIELDS: ClassVar[Mapping[str, Callable[[str], Any]]] = {}

    @classmethod
    def restore(cls, message: str, detail: dict[str, str]) -> SharedRPCError:
        """Rebuild an error from the parts that :meth:`detail` put on the wire, some of which may be missing."""
        make: Any = cls
        return cast("SharedRPCError", make(message, **{name: read(detail.get(name, "")) for name, read in cls._FIELDS.items()}))

    def detail(self) -> dict[str, str]:
        """Return the attributes of this class other than its message, as texts."""
        return {name: _as_text(getattr(self, name)) for name in self._FIELDS}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        # An exception with keyword-only arguments would break a process pool that unpickles it.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigurationError(SharedRPCError):
    """An option, an environment variable or a path is unusable."""

    code = "configuration"


class ConnectError(SharedRPCError, ConnectionError):
    """No server answers at the socket."""

    code = "connect"


class ConnectionClosed(SharedRPCError, ConnectionError):
    """The connection ended before the reply arrived; the request may or may not have had its effect.

    The clients themselves repeat requests that were not sent in full, and queries.
    """

    code = "connection-closed"


class DeadlineExceeded(SharedRPCError, TimeoutError):
    """The caller's timeout passed. The server is notified; other waiters of the same run are unaffected."""

    code = "deadline-exceeded"


class ProtocolError(SharedRPCError):
    """Bytes or file descriptors that the protocol does not allow."""

    code = "protocol"


class SegmentNotFound(ProtocolError):
    """A call names memory that the server does not, or no longer, keep: the library's own client sends it then.

    ``segments`` are the ids unknown to the server.
    """

    code = "segment-not-found"
    _FIELDS: ClassVar = {"segments": str.split}

    def __init__(self, message: str, segments: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.segments = tuple(segments)


class CodecError(SharedRPCError):
    """A value could not be pickled or rebuilt; the message names the attribute path."""

    code = "codec"


class CapabilityError(SharedRPCError):
    """A payload or a device that cannot be shared; the message names it and the remedy."""

    code = "capability"


class EndpointNotFound(SharedRPCError, LookupError):
    """The server has no endpoint of that name."""

    code = "endpoint-not-found"


class SignatureError(SharedRPCError, TypeError):
    """The arguments of a call do not fit the endpoint's signature."""

    code = "signature"


class _WithReason(Exception):
    # No subclass of SharedRPCError, whose subclasses are those on the wire.
    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BufferNotFound(_WithReason, SharedRPCError, LookupError):
    """The server has no available buffer of that id. Its holders keep it.

    ``reason`` is ``"unknown"``, ``"freed"``, ``"expired"`` (its ``ttl``) or ``"released"`` (its last lease has ended).
    """

    code = "buffer-not-found"
    _FIELDS: ClassVar = {"reason": _or("unknown")}


class CheckpointError(SharedRPCError, ValueError):
    """A file of weights is truncated, damaged, or not of its format. The message names the file, and the tensor."""

    code = "checkpoint"


class RefreshError(SharedRPCError):
    """A generation was built but not made current: its call was invalidated since, or a later refresh ended first."""

    code = "refresh"


class ChannelClosed(SharedRPCError):
    """The peer of a channel no longer sends or receives.

    ``reason`` is ``"closed"``, ``"ended"`` (its process was killed, or did not close the channel) or ``"abandoned"`` (the
    sender gave up in the middle of this message; the next one can be received). ``pid`` is that process, in its own pid
    namespace.
    """

    code = "channel-closed"
    _FIELDS: ClassVar = {"reason": _or("closed"), "pid": _int_or(0)}

    def __init__(self, message: str, *, reason: str, pid: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.pid = pid


class UpdateInterrupted(SharedRPCError):
    """An update in place began and did not end, so the memory is partly old and partly new, until a later update ends.

    ``revision`` is the odd number that it left, ``pid`` the writing process, in its own pid namespace.
    """

    code = "update-interrupted"
    _FIELDS: ClassVar = {"revision": _int_or(1), "pid": _int_or(0)}

    def __init__(self, message: str, *, revision: int, pid: int) -> None:
        super().__init__(message)
        self.revision = revision
        self.pid = pid


class StateMismatchError(SharedRPCError):
    """A model cannot be built around existing tensors; the message lists the mismatches, up to a length.

    ``missing`` has all names that only the model has, ``unexpected`` those that only the source has, and
    ``mismatched`` a text for each that differs in shape or dtype.
    """

    code = "state-mismatch"
    _FIELDS: ClassVar = dict.fromkeys(("missing", "unexpected", "mismatched"), _lines)

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


class TicketError(_WithReason, SharedRPCError):
    """A ticket that cannot be used here; the message names the file and the remedy.

    ``reason`` is ``"unreadable"`` (missing or not readable), ``"untrusted"`` (others may have written it), ``"malformed"``, or
    ``"other_server"``: the client is connected to a server other than the ticket's.
    """

    code = "ticket"
    _FIELDS: ClassVar = {"reason": _or("malformed")}


class RecordError(_WithReason, SharedRPCError):
    """An exported record, or a file of one, that cannot be adopted here; the message gives the reason, and names both sides.

    ``reason`` is ``"unreadable"`` (missing, or not readable or writable), ``"untrusted"`` (others may have written it),
    ``"malformed"``, ``"damaged"`` (the bytes have changed), ``"version"``, ``"device"``, ``"endpoint"``, ``"code"``
    (the endpoint's code differs), or ``"buffers"``: the buffers do not match its segments.
    """

    code = "record"
    _FIELDS: ClassVar = {"reason": _or("malformed")}


class ServerBusy(SharedRPCError):
    """A limit of the server is reached; the message names the limit."""

    code = "server-busy"


class WorkerCrashed(SharedRPCError):
    """The process that ran an endpoint has ended, or could not be started.

    ``signal`` is the name of the signal that ended it, such as ``"SIGSEGV"``, and ``exit_code`` its exit code; either is None
    if it does not apply. ``stderr`` holds the last lines of its standard error.
    """

    code = "worker-crashed"
    _FIELDS: ClassVar = {"signal": _or(None), "exit_code": _int_or(None), "stderr": str}

    def __init__(self, message: str, *, signal: str | None = None, exit_code: int | None = None, stderr: str = "") -> None:
        super().__init__(message)
        self.signal = signal
        self.exit_code = exit_code
        self.stderr = stderr


class ClusterError(SharedRPCError):
    """The source of a server's records, or the cluster behind it, has failed; the message says which.

    ``reason`` is ``"failed"``; for a source's own methods also ``"replaced"`` (another source was attached to the server),
    ``"detached"`` (it was closed, or its session or server has ended), or ``"answered"``: the miss was answered, or no call
    waits for it any more.
    """

    code = "cluster"
    _FIELDS: ClassVar = {"reason": _or("failed")}

    def __init__(self, message: str, *, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class StaleHandleError(_WithReason, SharedRPCError):
    """The handle's object is no longer owned by the server that issued it.

    ``reason`` is ``"released"``, ``"object_gone"``, ``"server_changed"`` or ``"server_unreachable"``; for ``latest()`` also
    ``"invalidated"``, for ``open_ticket()`` also ``"superseded"``. Tensors taken from the handle stay valid: their memory is
    held by this process.
    """

    code = "stale-handle"
    _FIELDS: ClassVar = {"reason": _or("object_gone")}


class HandleSuspended(SharedRPCError):
    """The handle is suspended, so its value cannot be accessed in this process. ``resume()`` it, or use ``active()``.

    Either its process has suspended it, or its object was evicted while the session with the server was lost, so its
    memory is outdated.
    """

    code = "handle-suspended"


class TaskError(_WithReason, SharedRPCError):
    """A task, or its result, is not available.

    ``reason`` is ``"unknown"``, ``"expired"``, ``"unfinished"``, ``"released"`` or ``"cancelled"``.
    """

    code = "task"
    _FIELDS: ClassVar = {"reason": _or("unknown")}


class TaskCancelled(TaskError):
    """The task was cancelled. In an endpoint, :func:`shared_rpc.raise_if_cancelled` raises it."""

    code = "task-cancelled"

    def __init__(self, message: str = "the task was cancelled", *, reason: str = "cancelled") -> None:
        super().__init__(message, reason=reason)


class RemoteError(SharedRPCError):
    """An endpoint raised an exception that has no counterpart here.

    ``type_name`` is the qualified name of its type, ``message`` its text, ``traceback`` the remote traceback. ``pickled`` is
    the exception itself for a source of records, which forwards it; else ``b""``.
    """

    code = "remote"
    _FIELDS: ClassVar = {"type_name": _or("Exception"), "traceback": str}

    def __init__(self, message: str, *, type_name: str, traceback: str = "", pickled: bytes = b"") -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        self.pickled = pickled


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


#: The classes by their codes.
_BY_CODE = _tree(SharedRPCError)


def to_wire(error: BaseException) -> tuple[str, str, dict[str, str]]:
    """Return ``(code, message, detail)`` of an error raised by the library itself. Never raises."""
    code, message, detail = _parts(error)
    return code, sendable(message), {name: sendable(text) for name, text in detail.items()}


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, even if its ``__str__`` fails, including with SystemExit."""
    try:
        return str(error)
    except BaseException as problem:
        return f"<its __str__ raised {type(problem).__name__}>"


#: Characters. A longer text is cut in the middle to fit a frame and stay readable.
_TEXT_LIMIT = 1 << 16


def one_line(text: str) -> str:
    """Return a text without line breaks and other control characters, for a terminal or a log: it may be untrusted."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def sendable(text: str) -> str:
    """Convert a text for MessagePack, with a bounded length."""
    if len(text) > _TEXT_LIMIT:
        half = _TEXT_LIMIT // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    # A file name that is not UTF-8 has surrogates (PEP 383), which MessagePack refuses.
    return text.encode("utf-8", "backslashreplace").decode()


def _parts(error: BaseException) -> tuple[str, str, dict[str, str]]:
    if isinstance(error, RemoteError):
        return error.code, error.message, error.detail()
    if isinstance(error, SharedRPCError):
        return error.code, text_of(error), error.detail()
    return SharedRPCError.code, f"{type(error).__name__}: {text_of(error)}", {}


def class_of(code: str) -> type[SharedRPCError]:
    """Return the class of a wire code; the root for an unknown code."""
    return _BY_CODE.get(code, SharedRPCError)


def from_wire(code: str, message: str, detail: dict[str, str]) -> SharedRPCError:
    """Rebuild the error from the result of :func:`to_wire`; an unknown code gives the root class."""
    return class_of(code).restore(message, detail)


def raised_by_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised an error, judging by its traceback.

    Python's own handler of SIGINT has no frame. A handler that calls ``sys.exit()`` is distinguished from other code by its
    frame.
    """
    handlers = {_code_of(handler) for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)}
    passed = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, KeyboardInterrupt) or any(code in handlers for code in passed)


def _code_of(function: Callable[..., object]) -> object:
    """Return the code that a call of a function, a partial or another object executes; None if that is not Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
