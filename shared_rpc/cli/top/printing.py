"""The printed view: everything once, for pipes and scripts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shared_rpc import Client
from shared_rpc.cli.top.tables import ObjectChoice, Table, View, arranged, headline, objects, others, parts_for, totals
from shared_rpc.cli.top.watching import ServerWatcher, rates

__all__ = ["print_once"]

#: Cells of a line where no terminal sets a limit.
_UNLIMITED = 10_000
#: Cells between two columns.
_GAP = 2


def print_once(find: Callable[[str], Client], interval: float, sort: str, console: Console) -> None:
    """Print the second of two snapshots: rates need two.

    :raises SharedRPCError: if no server answers.
    """
    watcher = ServerWatcher(find)
    try:
        first = watcher.poll()
        time.sleep(interval)
        second = watcher.poll()
    finally:
        watcher.close()
    view = View(second, rates(first, second), parts_for(console), os.getpid())
    tables = [*others(view).values(), objects(view, arranged(second.objects, ObjectChoice(sort)))]
    if not sys.stdout.isatty():  # a program that reads a pipe gets one line for each row, however long
        console.width = _UNLIMITED
    for line in (headline(view), totals(view)):
        console.print(line, no_wrap=True, overflow="ellipsis")
    for table in tables:
        if table.rows or table is tables[-1]:
            console.print()
            console.print(_grid(table, console.width))


def _grid(table: Table, width: int) -> Grid:
    """Lay out a table; where not all columns fit, the last ones are left out."""
    grid, used = Grid(header_style="bold reverse", box=None, pad_edge=False), 0
    for number, title in enumerate(name.rstrip(">") for name in table.columns):
        used += max(cell_len(title), *(cells[number].cell_len for cells in table.rows), 0) + _GAP
        if number and used > width + _GAP:
            break
        grid.add_column(Text(title), justify="right" if table.columns[number].endswith(">") else "left", no_wrap=True)
    for cells in table.rows:
        grid.add_row(*cells[: len(grid.columns)])
    return grid
