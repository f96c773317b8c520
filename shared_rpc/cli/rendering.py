"""Tables for people, JSON for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["ago", "as_json", "size", "table"]

# What reads a pipe wants one line for each row, however long.
_console = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 10_000)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; columns whose name ends in ``>`` are right-aligned."""
    shown = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        shown.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(cell)) for cell in row))
    _console.print(shown)


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
