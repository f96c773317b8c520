"""A program on a pseudo-terminal, and its screen as SVG."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from io import StringIO
from itertools import groupby

import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

#: Seconds that a program has.
PATIENCE = 240.0
#: Seconds without a byte after which what is on the screen is a whole frame.
QUIET = 0.02
_COLORS = [
    (24, 26, 31),
    (235, 108, 116),
    (95, 211, 165),
    (226, 192, 109),
    (97, 175, 239),
    (198, 120, 221),
    (86, 182, 194),
    (200, 204, 212),
]
_THEME = TerminalTheme((24, 26, 31), (214, 216, 222), _COLORS, _COLORS)
#: rich's own fetches a font; a picture fetches nothing.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*|<!--.*?-->\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "ui-monospace, 'DejaVu Sans Mono', Menlo, monospace"
)

Row = list[tuple[str, Style]]


def screen_of(command: Sequence[str], environ: dict[str, str], columns: int, lines: int, until: str | None) -> list[Row]:
    """What the screen shows when the program has ended, or as soon as ``until``, an expression, is seen; then it is ended."""
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environ = {**environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True)
    os.close(slave)
    deadline = time.monotonic() + PATIENCE
    try:
        while True:
            seen = until is not None and any(re.search(until, line) for line in screen.display)
            ready, _, _ = select.select([master], [], [], QUIET if seen else max(deadline - time.monotonic(), 0))
            if seen and not ready:
                break
            if not ready:
                raise TimeoutError(f"{' '.join(command)} did not come to {until or 'its end'!r}:\n" + "\n".join(screen.display))
            try:
                data = os.read(master, 65536)
            except OSError:  # the terminal's other side was closed
                break
            if not data:
                break
            stream.feed(data)
        return _rows(screen)
    finally:
        process.terminate()
        process.wait()
        os.close(master)


def _rows(screen: pyte.Screen) -> list[Row]:
    rows = []
    for number in range(screen.lines):
        line = screen.buffer[number]
        rows.append([(line[column].data, _style(line[column])) for column in range(screen.columns)])
    while rows and all(character == " " for character, _ in rows[-1]):
        rows.pop()
    return rows


def _style(cell: pyte.screens.Char) -> Style:
    color = _color(cell.fg)
    return Style(color=color, bgcolor=_color(cell.bg), bold=cell.bold, italic=cell.italics, reverse=cell.reverse)


def _color(name: str) -> str | None:
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    # The names of pyte are those of a terminal of 1984, where yellow is brown.
    return name.replace("bright", "bright_").replace("brown", "yellow")


def replaced(rows: list[Row], pattern: str, new: Callable[[str], str]) -> list[Row]:
    """The rows with each match replaced by as many characters, so that all stays in its column."""

    def row_of(row: Row) -> Row:
        text = "".join(character for character, _ in row)
        for found in re.finditer(pattern, text):
            instead = new(found[0])
            if len(instead) != len(found[0]):
                raise ValueError(f"{found[0]!r} cannot be replaced by {instead!r}: it must be as long")
            for place, character in enumerate(instead, found.start()):
                row[place] = (character, row[place][1])
        return row

    return [row_of(list(row)) for row in rows]


def svg_of(name: str, command: str, rows: list[Row], columns: int) -> str:
    """The picture of a terminal in which the command was typed."""
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    for row in rows:
        runs = [("".join(character for character, _ in run), style) for style, run in groupby(row, key=lambda cell: cell[1])]
        console.print(Text.assemble(*runs), soft_wrap=True)
    return console.export_svg(title="", theme=_THEME, code_format=_FORMAT, unique_id=f"cli-{name}")
