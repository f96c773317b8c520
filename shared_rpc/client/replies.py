"""The errors in error replies."""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shared_rpc.errors import DeadlineExceeded, RemoteError, RemoteTraceback, from_wire, raised_by_handler
from shared_rpc.protocol import messages as m
from shared_rpc.protocol.frames import Frame


def too_late(what: str) -> DeadlineExceeded:
    """Return the error for an operation that ran out of time."""
    return DeadlineExceeded(
        f"{what} took longer than its timeout. A started run continues in the server: call again to join it or to get its "
        f"result"
    )


def _native(error: Any, type_name: str) -> Any:
    """Convert an exception to this process's class of the same name, if the script that defines it runs here as well.

    Classes of a script are pickled as code, and ``except`` compares classes by identity, not by name.
    """
    module = type(error).__module__
    script = sys.modules.get("__main__")
    here = module in ("__main__", Path(getattr(script, "__file__", None) or "").stem)
    found: Any = script if here else sys.modules.get(module)
    for name in type_name.removeprefix(f"{module}.").split("."):
        found = getattr(found, name, None)
    if isinstance(found, type) and issubclass(found, Exception) and found is not type(error):
        with suppress(TypeError):  # a class with another layout
            error.__class__ = found
    return error


def raise_error(message: m.Error, frame: Frame) -> NoReturn:
    """Raise the error in an error reply, and close its frame.

    It is the endpoint's own exception if that can be rebuilt, with the remote traceback as its cause; else the library's.
    """
    error: Exception = from_wire(message.code, message.text, message.detail)
    cause = RemoteTraceback(message.detail["traceback"]) if message.detail.get("traceback") else None
    try:
        if message.endpoint_raised:
            own = _own_error(message, frame)
            if own is not None:
                error = own
                del own
        elif isinstance(error, RemoteError):
            error.pickled = bytes(frame.payload)  # for a source of records, which does not load it
        raise _marked(error, message) from cause
    finally:
        frame.close()
        # The error has this frame in its traceback: without del, only the cyclic collector would free them.
        del error, cause


def _own_error(message: m.Error, frame: Frame) -> Exception | None:
    """Rebuild an endpoint's own exception.

    :returns: None if its class is not available, or rebuilding it fails for any reason: RemoteError has all of it then.
        An exception that is not an Exception was meant for the server's process.
    """
    try:
        own = _native(pickle.loads(frame.payload), message.detail["type_name"])
    except BaseException as error:
        if raised_by_handler(error):
            raise
        return None
    return own if isinstance(own, Exception) else None


def _marked(error: Exception, message: m.Error) -> Exception:
    """Add the id of the request in the server's log to an error."""
    request_id = message.detail.get("request_id", "")
    if request_id:
        # An exception of another library may refuse further attributes.
        with suppress(Exception):
            foreign: Any = error
            foreign.request_id = request_id
            foreign.add_note(f"request {request_id} of the server's log")
    return error
