"""Bars of one line: how much of a whole is what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

__all__ = ["ASCII", "BLOCKS", "Glyphs", "bar", "sparkline"]


class Glyphs(NamedTuple):
    """What bars are drawn with: each part in turn, what is empty, and heights from low to high."""

    parts: tuple[str, ...]
    empty: str
    heights: str


BLOCKS = Glyphs(("█", "▓", "▒"), "░", "▁▂▃▄▅▆▇█")
#: For terminals that cannot show those.
ASCII = Glyphs(("#", "=", "+"), ".", "_.:-=+*#")


def bar(parts: Sequence[tuple[float, str]], total: float, width: int, glyphs: Glyphs) -> Text:
    """A bar of exactly ``width`` cells.

    A part of more than nothing has a cell at least while there is one, so that it is seen; what exceeds the total is not drawn.

    :param parts: of the total, each an amount and a style.
    """
    line = Text()
    left, begun = width, 0.0
    for number, (amount, style) in enumerate(parts):
        begun += amount
        end = round(width * min(begun / total, 1.0)) if total > 0 else 0
        cells = min(max(end - (width - left), 1 if amount > 0 else 0), left)
        line.append(glyphs.parts[number % len(glyphs.parts)] * cells, style)
        left -= cells
    return line.append(glyphs.empty * left, "dim")


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The last ``width`` values as heights, the largest of them the highest."""
    shown = list(values)[-width:] if width > 0 else []
    highest, steps = max(shown, default=0.0), len(glyphs.heights) - 1
    return "".join(glyphs.heights[round(steps * value / highest) if highest > 0 else 0] for value in shown)
