"""Tables and texts for people, JSON for machines."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared_rpc.protocol.infos import ObjectInfo, ServerInfo
from shared_rpc.protocol.tasks import Progress, TaskInfo

__all__ = [
    "ago",
    "as_json",
    "complain",
    "contents",
    "one_line",
    "origin",
    "percent",
    "size",
    "status_of",
    "steps",
    "table",
    "task_object",
    "took",
]

# What reads a pipe wants one line for each row, however long.
_console = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 10_000)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, a line for each row; columns whose name ends in ``>`` are right-aligned."""
    shown = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        shown.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(one_line(str(cell))) for cell in row))
    _console.print(shown)


def complain(text: str) -> None:
    """Tell of an error. It may quote what others have written, so nothing in it moves a terminal's cursor."""
    lines = "\n".join(one_line(line) for line in text.splitlines())
    print(f"shared-rpc: {lines}", file=sys.stderr)


def as_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2))


def size(nbytes: int) -> str:
    """Bytes for people: ``"1.5 GiB"``."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def ago(moment: float) -> str:
    """How long ago a Unix time was: ``"3 min"``."""
    seconds = max(time.time() - moment, 0)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def one_line(text: str) -> str:
    """The text without line breaks, and without what moves a terminal's cursor."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


# Of objects.


def contents(info: ServerInfo) -> str:
    """How many objects a server has, and how many of them are buffers."""
    objects, buffers = info["objects"], info["buffers"]
    return f"{objects} ({buffers} buffer{'' if buffers == 1 else 's'})" if buffers else str(objects)


def origin(item: ObjectInfo) -> str:
    """What an object is the result of, or that it is a buffer, and whether it can still be got."""
    if item["kind"] != "buffer":
        return str(item["cache_key"] or item["endpoint"])
    return "buffer" if item["state"] == "listed" else f"buffer, {item['state']}"


# Of tasks.


def status_of(info: TaskInfo) -> str:
    """The status, and whether the task was asked to leave it."""
    return f"{info.status}, asked to stop" if info.cancel_requested and not info.status.finished else str(info.status)


def took(info: TaskInfo) -> str:
    """How long the task ran, or has run until now: ``"1.2 s"``; ``"-"`` for one that did not begin."""
    if info.started_at is None:
        return "-"
    seconds = max((info.finished_at or time.time()) - info.started_at, 0)
    return f"{seconds:.1f} s" if seconds < 100 else ago(time.time() - seconds)


def steps(progress: Progress | None) -> str:
    """How far a task is, in the endpoint's own units and words: ``"3/10 loading"``."""
    if progress is None:
        return ""
    total = f"/{_number(progress.total)}" if progress.total is not None else ""
    return f"{_number(progress.done)}{total} {one_line(progress.message)}".rstrip()


def percent(progress: Progress | None) -> float | None:
    """How far a task is, from 0 to 100; None where that is not known."""
    if progress is None or not progress.total or not math.isfinite(progress.done / progress.total):
        return None
    return min(max(100 * progress.done / progress.total, 0.0), 100.0)


def task_object(info: TaskInfo) -> dict[str, Any]:
    """What JSON tells of a task: its fields, those of its progress by name too. JSON has no infinity."""
    fields: dict[str, Any] = msgspec.to_builtins(info)
    if info.progress is not None:
        fields["progress"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in msgspec.structs.asdict(info.progress).items()
        }
    return fields


def _number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:.2f}"
