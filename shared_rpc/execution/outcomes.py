"""Outcomes of runs: a record and a value, or an error that can be sent and kept."""

from __future__ import annotations

import copy
import logging
import os
import traceback
from typing import Any

import msgspec

from shared_rpc.errors import CapabilityError, RemoteError, SharedRPCError, class_of, text_of, to_wire
from shared_rpc.memory.records import Record

_log = logging.getLogger("shared_rpc.server")

#: Bytes. An exception with a larger pickle carries data, and arrives as a RemoteError.
_EXCEPTION_LIMIT = 1 << 20


class Completed(msgspec.Struct):
    """A successful run. The receiver owns ``record``; ``live`` is the value if it is in this process."""

    record: Record | None
    live: Any


class Failure(msgspec.Struct, frozen=True):
    """A failed run or call. ``pickled`` holds an endpoint's own exception, which only the caller loads.

    ``sealed`` is True if the receiver forwards the exception without loading it.
    """

    code: str
    text: str
    detail: dict[str, str]
    pickled: bytes = b""
    error: BaseException | None = None
    kept: bool = False
    sealed: bool = False

    @property
    def type_name(self) -> str:
        """The name of the exception's type."""
        return self.detail.get("type_name") or class_of(self.code).__name__

    def clear_frames(self) -> None:
        """Release the objects in the failed endpoint's frames, such as its arguments."""
        if self.error is not None:
            for error in _related(self.error):
                traceback.clear_frames(error.__traceback__)

    def remembered(self, limit: int) -> Failure:
        """Return a copy to keep, without references to objects of the endpoint.

        An exception whose pickle is larger than ``limit`` bytes, or that cannot be pickled, becomes a RemoteError.
        """
        self.clear_frames()
        if self.code != RemoteError.code or 0 < len(self.pickled) <= limit:
            return msgspec.structs.replace(self, kept=True)
        kept = RemoteError(self.text, type_name=self.type_name, traceback=self.detail.get("traceback", ""))
        return msgspec.structs.replace(self, pickled=b"", error=kept, kept=True)

    def seal(self) -> Failure:
        """Return a copy for a receiver that forwards it: an endpoint's exception stays pickled."""
        if self.code != RemoteError.code:
            return self
        traceback_text = self.detail.get("traceback", "")
        sealed = RemoteError(self.text, type_name=self.type_name, traceback=traceback_text, pickled=self.pickled)
        return msgspec.structs.replace(self, error=sealed, sealed=True)

    def to_raise(self) -> BaseException:
        """Return the exception for a caller in this process; a copy if the failure is kept, since raising adds frames."""
        assert self.error is not None, "a failure of this process has its exception"
        if not self.kept:
            return self.error
        try:
            again = copy.copy(self.error)
        except Exception:  # the exception's constructor takes other arguments
            return self.error
        again.__cause__, again.__suppress_context__ = self.error.__cause__, self.error.__suppress_context__
        return again.with_traceback(self.error.__traceback__)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make the failure of an error raised by the library."""
        return cls(*to_wire(error), error=error)

    @classmethod
    def unexpected(cls, error: BaseException, what: str) -> Failure:
        """Make the failure of any error in this process. Errors from outside the library are logged with their tracebacks.

        :param what: the failed operation, for the log.
        """
        if isinstance(error, SharedRPCError):
            return cls.of(error)
        _log.error("%s", what, exc_info=error)
        return cls.of(CapabilityError(f"the server (pid {os.getpid()}) failed: {type(error).__name__}: {text_of(error)}"))

    @classmethod
    def raised(cls, error: BaseException) -> Failure:
        """Make the failure of an endpoint's exception."""
        text = _traceback(error)
        name = (
            type(error).__qualname__
            if type(error).__module__ == "builtins"
            else f"{type(error).__module__}.{type(error).__qualname__}"
        )
        remote = RemoteError(text_of(error), type_name=name, traceback=text)
        pickled = b""
        # SystemExit and its like end the process that raises them, and must not end the caller's.
        if isinstance(error, Exception):
            try:
                from shared_rpc.codec.skeleton import dump_exception

                pickled = dump_exception(error)
            except BaseException:  # no error of the exception's own methods may reach the waiters
                pickled = b""
        local = error if isinstance(error, Exception) else remote
        return cls(*to_wire(remote), pickled=pickled if len(pickled) <= _EXCEPTION_LIMIT else b"", error=local)


def _related(error: BaseException) -> list[BaseException]:
    """List an exception, its causes and contexts, and the members of groups, without duplicates."""
    found: dict[int, BaseException] = {}
    open_ends: list[BaseException | None] = [error]
    while open_ends:
        error_or_none = open_ends.pop()
        if error_or_none is None or id(error_or_none) in found:
            continue
        found[id(error_or_none)] = error_or_none
        open_ends += [error_or_none.__cause__, error_or_none.__context__]
        if isinstance(error_or_none, BaseExceptionGroup):
            open_ends += error_or_none.exceptions
    return list(found.values())


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as problem:
        return f"<the traceback cannot be formatted: {type(problem).__name__}>"
