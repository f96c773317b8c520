"""Logs: one line per event, as text or as JSON, with the id of its request.

The library writes to loggers below ``shared_rpc``, and configures none of them when it is imported. :func:`configure` is for
programs: ``shared-rpc serve --log-format json`` calls it, in the server and in its workers. A program that configures logging
itself adds a :class:`RequestIdFilter` to its handlers, and, for a line with each event, :data:`log_event` to the hooks.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
from enum import StrEnum
from typing import Any

import msgspec
from pythonjsonlogger.core import RESERVED_ATTRS, merge_record_extra
from pythonjsonlogger.json import JsonFormatter as BaseJsonFormatter

from shared_rpc.context import CURRENT_RUN
from shared_rpc.observability import events as e

__all__ = ["JsonFormatter", "LogFormat", "LogLevel", "RequestIdFilter", "TextFormatter", "configure", "log_event"]


class LogFormat(StrEnum):
    """Format of a line."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """Least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_log = logging.getLogger("shared_rpc.events")

#: Levels of events. Events of every short call are for debugging.
_LEVELS: dict[type[e.Event], int] = {
    e.CallStarted: logging.DEBUG,
    e.CallFinished: logging.DEBUG,
    e.BuildStarted: logging.DEBUG,
    e.LeaseGiven: logging.DEBUG,
    e.LeaseEnded: logging.DEBUG,
}


class RequestIdFilter(logging.Filter):
    """Filter for handlers that adds ``request_id`` to every record: the id of the call whose endpoint logs it, else ``"-"``.
    ``handler.addFilter(RequestIdFilter())``; in a format it is ``%(request_id)s``.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the id to a record without one."""
        if not hasattr(record, "request_id"):
            run = CURRENT_RUN.get()
            record.request_id = run.request_id if run is not None and run.request_id else "-"
        return True


class _Utc(logging.Formatter):
    """Formatter with times in UTC, to the millisecond, as in RFC 3339."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class TextFormatter(_Utc):
    """Formatter of lines ``time level logger [request id] message field=value …``; only tracebacks have several."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Append the fields of a record to its line."""
        fields = merge_record_extra(record, {}, {*RESERVED_ATTRS, "request_id"})
        line = super().formatMessage(record)
        if not line.isprintable():  # a client's text could look like another line, or move a terminal's cursor
            line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in fields.items())])


class JsonFormatter(_Utc, BaseJsonFormatter):
    """Formatter of one JSON object a line: ``time``, ``level``, ``logger``, ``message``, ``request_id``, ``process`` (its id),
    the fields of the event, and ``exception`` with the traceback of an error.
    """

    def __init__(self) -> None:
        names = {"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "exception"}
        fields = ("asctime", "levelname", "name", "message", "request_id", "process")
        super().__init__(" ".join(f"%({name})s" for name in fields), rename_fields=names, json_default=str)

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """Complete a record that no :class:`RequestIdFilter` has processed."""
        return log_data | {"request_id": log_data["request_id"] or "-"}


def _shown(value: object) -> str:
    """Format a value for a line of text; with blanks, quotes or control characters it is quoted as in JSON."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and text and not any(c in ' "=' for c in text) else json.dumps(text)


def log_event(event: e.Event) -> None:
    """Write one line for an event, as a hook, to the logger ``shared_rpc.events``, with its fields as the record's."""
    level = _level(event)
    if not _log.isEnabledFor(level):
        return
    fields = {name: value for name, value in msgspec.structs.asdict(event).items() if value not in ("", None)}
    fields.setdefault("request_id", "-")
    _log.log(level, _words(type(event).__name__), extra={"event": type(event).__name__, **fields})


def _level(event: e.Event) -> int:
    if isinstance(event, e.WorkerEnded) and event.crashed:
        return logging.ERROR
    if isinstance(event, e.BuildFinished):  # every call of an uncached endpoint is a build
        return logging.INFO if event.cached or event.error else logging.DEBUG
    if isinstance(event, e.TaskChanged):
        return logging.INFO if event.status in ("completed", "failed", "cancelled") else logging.DEBUG
    return _LEVELS.get(type(event), logging.INFO)


@functools.cache
def _words(name: str) -> str:
    """Return ``call finished`` for ``CallFinished``."""
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


def configure(
    style: LogFormat | str = "text",
    level: LogLevel | str = "info",
    handler: logging.Handler | None = None,
    *,
    events: bool = True,
) -> logging.Handler:
    """Log to standard error, in a program that does not configure logging itself. Returns the root logger's new handler.

    :param style: ``"text"`` or ``"json"``.
    :param level: the least severe level shown: ``"debug"``, ``"info"``, ``"warning"`` or ``"error"``.
    :param handler: the handler of the lines, instead of one for standard error.
    :param events: True for a line per event.
    """
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(RequestIdFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    if events:
        e.add_hook(log_event)
    return handler
