"""Logs: one line for each event, as text or as JSON, with the id of the request that it belongs to.

The library writes to loggers below ``shared_rpc``, and configures none of them when it is imported. :func:`configure` is for
programs: ``shared-rpc serve --log-format json`` calls it, in the server and in its workers. A program that has its own set-up
adds a :class:`RequestIdFilter` to its handlers, and, for a line with each event, :data:`log_event` to the hooks.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from enum import StrEnum
from typing import Any

import msgspec

from shared_rpc import instrumentation as i
from shared_rpc.context import CURRENT_RUN

__all__ = ["JsonFormatter", "LogFormat", "LogLevel", "RequestIdFilter", "TextFormatter", "configure", "log_event"]


class LogFormat(StrEnum):
    """What a line looks like."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """What is logged: this, and what is worse."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_log = logging.getLogger("shared_rpc.events")

#: What every record has; whatever else it has was given with ``extra``.
_STANDARD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "request_id", "taskName"})

#: The level of each event. Those that come with every short call are for debugging.
_LEVELS: dict[type[i.Event], int] = {
    i.CallStarted: logging.DEBUG,
    i.CallFinished: logging.DEBUG,
    i.BuildStarted: logging.DEBUG,
    i.LeaseGiven: logging.DEBUG,
    i.LeaseEnded: logging.DEBUG,
}


class RequestIdFilter(logging.Filter):
    """Lets every record pass, with ``request_id``: that of the call which the endpoint that logs it runs for, else ``"-"``.

    It is for handlers: ``handler.addFilter(RequestIdFilter())``. In a format it is ``%(request_id)s``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """See :class:`logging.Filter`. An id that the record has already stays."""
        if not hasattr(record, "request_id"):
            run = CURRENT_RUN.get()
            record.request_id = run.request_id if run is not None and run.request_id else "-"
        return True


class _Formatter(logging.Formatter):
    """Times are UTC, to the millisecond, as RFC 3339 has them."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """See :class:`logging.Formatter`."""
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class TextFormatter(_Formatter):
    """``time level logger [request id] message field=value …``, on one line but for tracebacks."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        fields = " ".join(f"{name}={_shown(value)}" for name, value in _fields(record).items())
        line = super().formatMessage(record)
        return f"{line} {fields}" if fields else line


class JsonFormatter(_Formatter):
    """One JSON object a line: ``time``, ``level``, ``logger``, ``message``, ``request_id``, ``process`` (its id), the fields of
    the event, and ``exception`` with the traceback of an error.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "-"),
            "process": record.process,
        }
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _shown(value: object) -> str:
    """A value of a line of text; one with blanks or quotes in it as JSON has it."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and not any(c.isspace() or c in '"=' for c in text) else json.dumps(text)


def log_event(event: i.Event) -> None:
    """A hook that writes one line for each event to the logger ``shared_rpc.events``, with its fields as the record's."""
    level = _level(event)
    if not _log.isEnabledFor(level):
        return
    fields = {name: value for name, value in msgspec.structs.asdict(event).items() if value not in ("", None)}
    fields.setdefault("request_id", "-")
    _log.log(level, _WORDS[type(event)], extra={"event": type(event).__name__, **fields})


def _level(event: i.Event) -> int:
    if isinstance(event, i.WorkerEnded) and event.crashed:
        return logging.ERROR
    if isinstance(event, i.BuildFinished):  # of an endpoint that is not cached every call is one
        return logging.INFO if event.cached or event.error else logging.DEBUG
    if isinstance(event, i.TaskChanged):
        return logging.INFO if event.status in ("completed", "failed", "cancelled") else logging.DEBUG
    return _LEVELS.get(type(event), logging.INFO)


def _words(name: str) -> str:
    """``CallFinished`` as ``call finished``."""
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


_WORDS = {kind: _words(kind.__name__) for kind in i.Event.__subclasses__()}


def configure(
    style: LogFormat | str = "text",
    level: LogLevel | str = "info",
    handler: logging.Handler | None = None,
    *,
    events: bool = True,
) -> logging.Handler:
    """Log to standard error, for a program that has not set up logging itself: the handler, which the root logger has now.

    :param style: ``"text"`` or ``"json"``.
    :param level: of what is shown: ``"debug"``, ``"info"``, ``"warning"`` or ``"error"``.
    :param handler: where the lines go instead.
    :param events: whether there is a line for each event.
    """
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(RequestIdFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    if events:
        i.add_hook(log_event)
    return handler
