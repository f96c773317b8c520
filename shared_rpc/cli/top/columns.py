"""Tables that fit: columns go by rank where there is no room for all, and the elastic ones share what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

__all__ = ["Column", "clipped", "fit", "joined", "shares", "table"]

#: Cells between two columns.
_GAP = 1


@dataclass(frozen=True)
class Column:
    """One column, as wide as its widest cell, or an elastic one that may be narrower.

    :param rank: where there is no room for all, the column of the highest rank goes first.
    :param least: cells that an elastic column needs to be of use; None for one that is not elastic.
    """

    title: str
    cells: Sequence[Text]
    rank: int
    right: bool = False
    least: int | None = None
    #: Draws the cell of a row for a width, in place of what is in ``cells``, whose width is the widest it can do with.
    paint: Callable[[int, int], Text] | None = None

    @property
    def natural(self) -> int:
        """The width that shows everything."""
        return max([cell_len(self.title), *(cell.cell_len for cell in self.cells)])

    @property
    def narrowest(self) -> int:
        """The width below which it is left out."""
        return self.natural if self.least is None else min(self.least, self.natural)

    def cell(self, row: int, width: int) -> Text:
        """What there is in a row, exactly ``width`` cells wide."""
        return _cell(self.cells[row] if self.paint is None else self.paint(row, width), width, self.right)


def fit(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that there is room for, in their order, with their widths. The one of the lowest rank is always there."""
    chosen = list(columns)
    while len(chosen) > 1 and sum(one.narrowest + _GAP for one in chosen) - _GAP > width:
        chosen.remove(max(chosen, key=lambda one: one.rank))
    spare = width - sum(one.narrowest + _GAP for one in chosen) + _GAP
    more = shares([one.natural - one.narrowest for one in chosen], max(spare, 0))
    return [(one, min(one.narrowest + extra, width)) for one, extra in zip(chosen, more, strict=True)]


def shares(wanted: Sequence[int], available: int) -> list[int]:
    """Share what there is, so that nobody gets more than wanted, and whoever gets less gets no less than anybody else.

    What is left over by that goes to the first ones, one each.
    """
    given = [0] * len(wanted)
    while available > 0:
        hungry = [number for number, want in enumerate(wanted) if given[number] < want]
        if not hungry:
            break
        each = max(available // len(hungry), 1)
        for number in hungry[:available]:
            portion = min(each, wanted[number] - given[number])
            given[number] += portion
            available -= portion
    return given


def table(columns: Sequence[Column], width: int, style: str, selected: int | None = None) -> list[Text]:
    """The titles in one line, and a line for each row, each at most ``width`` cells wide.

    :param style: of the titles.
    :param selected: the row that stands out.
    """
    chosen = fit(columns, width)
    titles = [_cell(Text(column.title), room, column.right) for column, room in chosen]
    lines = [_padded(Text(" " * _GAP).join(titles), width, style)]
    for row in range(len(columns[0].cells)):
        line = Text(" " * _GAP).join([column.cell(row, room) for column, room in chosen])
        lines.append(_padded(line, width, "reverse") if row == selected else line)
    return lines


def clipped(text: Text, width: int) -> Text:
    """The text in one line of at most ``width`` cells."""
    if width <= 0:
        return Text()
    text = text.copy()
    text.truncate(width, overflow="ellipsis")
    return text


def joined(pieces: Sequence[Text], width: int, separator: str = "  ") -> Text:
    """As many of the pieces in one line as there is room for; of the first one at least the beginning."""
    line = clipped(pieces[0], width) if pieces else Text()
    for piece in pieces[1:]:
        if line.cell_len + len(separator) + piece.cell_len > width:
            break
        line = line + Text(separator) + piece
    return line


def _cell(text: Text, width: int, right: bool) -> Text:
    text = clipped(text, width)
    text.align("right" if right else "left", width)
    return text


def _padded(line: Text, width: int, style: str) -> Text:
    if width < _UNBOUNDED:
        line.pad_right(max(width - line.cell_len, 0))
    line.stylize(style)
    return line


#: Cells. What is as wide as that is no terminal, and nothing is drawn up to its edge.
_UNBOUNDED = 1000
