"""What a frame from the server means to its receiver."""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shared_rpc.client.steps import Request
from shared_rpc.errors import DeadlineExceeded, ProtocolError, RemoteTraceback, from_wire
from shared_rpc.lifecycle.interrupts import is_of_handler, passed_over
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.catalogue import decode_message, number_of
from shared_rpc.protocol.frames import Frame
from shared_rpc.protocol.tasks import TaskInfo

__all__ = ["event_of", "gave_up", "is_last", "message_of", "to_give_back", "too_late"]


def message_of(frame: Frame) -> m.Message:
    """The message of a frame, which is closed if this raises.

    :raises Exception: what an error reply stands for.
    """
    try:
        message = decode_message(frame)
        if isinstance(message, m.Error):
            _raise_error(message, frame)
        return message
    except BaseException:
        frame.close()
        raise


def gave_up(frame: Frame) -> bool:
    """Whether the frame only says that the server knows that nobody waits any more. It stays the caller's to close."""
    message = decode_message(frame) if frame.kind == _ERROR else None
    return isinstance(message, m.Error) and message.code == DeadlineExceeded.code


def to_give_back(frame: Frame, request: Request | None = None) -> m.Release | m.FreeBuffer | None:
    """Close a reply that nobody waits for any more; the message that gives back the lease which came with it, if one did."""
    try:
        message = decode_message(frame)
        if request is not None and request.lane is not None:
            request.lane.discard(message, frame)
    except ProtocolError:
        return None
    finally:
        frame.close()
    if request is not None and isinstance(request.message, m.CreateBuffer) and isinstance(message, m.Result):
        return m.FreeBuffer(message.object_id, release=True)  # nobody else knows of it
    if isinstance(message, m.Result) and message.managed:
        return m.Release([message.object_id])
    claimed = request is not None and isinstance(request.message, m.WaitTask) and request.message.claim
    if claimed and isinstance(message, m.TaskIs) and message.info.object_id is not None:
        return m.Release([message.info.object_id])
    return None


def too_late(what: str) -> DeadlineExceeded:
    """The error for an operation that ran out of time."""
    return DeadlineExceeded(
        f"{what} took longer than its timeout; what has begun goes on in the server, and asking again joins it or finds its "
        f"result"
    )


_ERROR = number_of(m.Error)
#: The kind byte of what may come before the last answer to a request.
_EVENT = number_of(m.TaskChanged)
_STARVED = number_of(m.Starved)


def event_of(frame: Frame, request: Request) -> TaskInfo | m.Free | None:
    """What a frame tells before a request's last answer: of a task that is waited for, or that the server needs memory, and
    then this is what to tell it. None for the last answer.
    """
    if frame.kind == _EVENT:
        message = decode_message(frame)
        assert isinstance(message, m.TaskChanged)
        return message.info
    if frame.kind == _STARVED:
        if request.lane is None:
            return m.Free([])
        if not request.starved:
            request.starved = True
            request.lane.hungry += 1
        return request.lane.starved()
    return None


def is_last(frame: Frame) -> bool:
    """Whether a frame is the last answer to its request."""
    return frame.kind not in (_EVENT, _STARVED)


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


def _raise_error(message: m.Error, frame: Frame) -> NoReturn:
    """Raise what an error reply stands for: an endpoint's own exception where it can be rebuilt, with the remote
    traceback as its cause; else the library's.
    """
    error = from_wire(message.code, message.text, message.detail)
    cause = RemoteTraceback(message.detail["traceback"]) if message.detail.get("traceback") else None
    try:
        if message.endpoint_raised:
            own = _own_error(message, frame)
            if own is not None:
                error = own
                del own
        raise _marked(error, message) from cause
    finally:
        # The error has this frame in its traceback, and would only go with the next pass of the cyclic collector.
        del error, cause


def _own_error(message: m.Error, frame: Frame) -> Exception | None:
    """Rebuild an endpoint's own exception.

    :returns: None where its class is not here, or making it fails in whatever way: RemoteError tells all of it then. An
        exception that ends the process which makes it was meant for the server's.
    """
    try:
        own = _native(pickle.loads(frame.payload), message.detail["type_name"])
    except BaseException as error:
        if is_of_handler(error):
            raise
        return None
    return own if isinstance(own, Exception) else None


def _marked(error: Exception, message: m.Error) -> Exception:
    """The error with the id by which the server's log knows its request."""
    request_id = message.detail.get("request_id", "")
    if request_id:
        # An exception of somebody else's may refuse further attributes.
        with passed_over(Exception):
            error.request_id = request_id  # type: ignore[attr-defined]
            error.add_note(f"request {request_id} of the server's log")
    return error
