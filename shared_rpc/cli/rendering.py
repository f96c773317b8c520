"""Tables and texts for display, JSON for programs."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shared_rpc.errors import one_line
from shared_rpc.protocol.infos import DeviceInfo, ObjectInfo, ServerInfo
from shared_rpc.protocol.tasks import Progress, TaskInfo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn
    from rich.text import Text

T = TypeVar("T")

#: The remark of ``info`` and ``doctor`` about a GPU used through NVIDIA's Multi-Process Service.
MPS = "under MPS: a write to memory shared with access='read' ends all processes of the service"


def width() -> int | None:
    """Return the width of output, None for that of the terminal. A pipe's reader gets one line for each row, however long."""
    return None if sys.stdout.isatty() else 10_000


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, a line for each row; columns whose name ends in ``>`` are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=False, width=width())
    shown = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        shown.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*map(cell, row))
    console.print(shown)


def cell(value: object, style: str = "") -> Text:
    """Return a cell of a table. Untrusted text has no control characters."""
    from rich.text import Text

    return value if isinstance(value, Text) else Text(one_line(str(value)), style)


def listing(title: str, items: Collection[T], columns: Mapping[str, Callable[[T], object]], json: bool = False) -> None:
    """Print a table with a line for each item; a column has the function of its cells, and ``-`` is a cell without content.

    A column whose name ends in ``?`` is left out if none of its cells has content.

    :param json: print the items as JSON instead.
    """
    if json:
        as_json(items)
        return
    cells = {name: [cell(item) for item in items] for name, cell in columns.items()}
    shown = {name.rstrip("?"): found for name, found in cells.items() if not name.endswith("?") or {*found} - {"-"}}
    table(title, list(shown), zip(*shown.values(), strict=True))


def bars(console: Console, *columns: ProgressColumn | str) -> RichProgress:
    """Make bars on a console, which disappear at the end; further columns are to the right of the bar."""
    from rich.progress import BarColumn, Progress, TextColumn

    texts = TextColumn("{task.description}", markup=False), BarColumn()
    return Progress(*texts, *columns, console=console, transient=True, disable=not console.is_terminal)


def complain(text: str) -> None:
    """Print an error, without control characters: it may quote untrusted text."""
    lines = "\n".join(one_line(line) for line in text.splitlines())
    print(f"shared-rpc: {lines}", file=sys.stderr)


def as_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2))


def size(nbytes: int) -> str:
    """Format bytes: ``"1.5 GiB"``."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def span(seconds: float) -> str:
    """Format a duration with three digits: ``"1.24 ms"``."""
    if seconds >= 100:
        return lasted(seconds, (" s", " min", " h", " d"))
    # A value that would be rounded to a thousand of one unit is one of the next.
    scale, unit = (1.0, "s") if seconds >= 0.9995 else (1e-3, "ms") if seconds >= 0.9995e-3 else (1e-6, "µs")
    return f"{seconds / scale:.3g} {unit}"


def ago(moment: float) -> str:
    """Format the time since a Unix time: ``"3 min"``."""
    return lasted(time.time() - moment, (" s", " min", " h", " d"))


def lasted(seconds: float, units: Sequence[str] = "smhd") -> str:
    """Format a duration in few characters: ``"3m"``."""
    unit = sum(seconds >= limit for limit in (120, 7200, 172800))
    return f"{max(seconds, 0) / (1, 60, 3600, 86400)[unit]:.0f}{units[unit]}"


def several(count: int, noun: str) -> str:
    """Format a number of things: ``"1 object"``, ``"2 objects"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def contents(info: ServerInfo) -> str:
    """Format the number of a server's objects, with that of its buffers."""
    objects, buffers = info["objects"], info["buffers"]
    return f"{objects} ({several(buffers, 'buffer')})" if buffers else str(objects)


def origin(item: ObjectInfo) -> str:
    """Return the call of which an object is the result; for a buffer ``"buffer"``, with its state unless it is listed."""
    if item["kind"] != "buffer":
        return str(item["cache_key"] or item["endpoint"])
    return "buffer" if item["state"] == "listed" else f"buffer, {item['state']}"


def tier_of(item: ObjectInfo) -> str:
    """Return an object's tier, with any active move: ``"host"``, ``"host, 40% to device"``."""
    moving = item.get("moving")
    pinned = ", pinned" if item["pinned"] else ""
    if moving is None:
        return f"{item['tier']}{pinned}"
    share = min(moving["done"] / moving["total"], 1.0) if moving["total"] else 0.0
    return f"{item['tier']}{pinned}, {share:.0%} to {moving['to']}"


def copies_of(item: ObjectInfo | ServerInfo | DeviceInfo) -> str:
    """Format the bytes of copies in lower tiers: ``"1.5 GiB host"``; ``"-"`` if there are none."""
    return ", ".join(f"{size(nbytes)} {tier}" for tier, nbytes in item["copies"].items() if nbytes) or "-"


def status_of(info: TaskInfo) -> str:
    """Format the status, with any request to stop, and the wait for capacity."""
    asked = ", asked to stop" if info.cancel_requested and not info.status.finished else ""
    return f"{info.status}{asked}{', waits for capacity' if info.waits_for is not None else ''}"


def took(info: TaskInfo) -> str:
    """Format the duration of a task, until now if it runs: ``"1.2 s"``; ``"-"`` for one that did not begin."""
    if info.started_at is None:
        return "-"
    seconds = max((info.finished_at or time.time()) - info.started_at, 0)
    return f"{seconds:.1f} s" if seconds < 100 else ago(time.time() - seconds)


def steps(progress: Progress | None) -> str:
    """Format a task's progress in the endpoint's own units and words: ``"3/10 loading"``."""
    if progress is None:
        return ""
    total = f"/{_number(progress.total)}" if progress.total is not None else ""
    return f"{_number(progress.done)}{total} {one_line(progress.message)}".rstrip()


def percent(progress: Progress | None) -> float | None:
    """Return a task's progress from 0 to 100; None if the total is not known."""
    if progress is None or not progress.total or not math.isfinite(progress.done / progress.total):
        return None
    return min(max(100 * progress.done / progress.total, 0.0), 100.0)


def task_object(info: TaskInfo) -> dict[str, Any]:
    """Return a task's fields for JSON, those of its progress by name. JSON has no infinity: it becomes None."""
    fields: dict[str, Any] = msgspec.to_builtins(info)
    if info.progress is not None:
        fields["progress"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in msgspec.structs.asdict(info.progress).items()
        }
    return fields


def _number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:.2f}"


def command_of(pid: int) -> str:
    """Return the command line of a process, without the program's directory; ``""`` if it cannot be read.

    A process that is ending, or is the kernel's, has only a name: ``"[name]"``.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if not any(words):
            return f"[{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()}]"
    except OSError:
        return ""
    program, *arguments = (os.fsdecode(word) for word in words)
    return " ".join([os.path.basename(program), *arguments]).strip()
