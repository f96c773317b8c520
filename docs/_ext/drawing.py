"""Boxes, arrows and words as SVG. What is drawn takes its colours from ``shared_rpc.css``, so it follows light and dark."""

from __future__ import annotations

from html import escape

#: Units from one line of a box to the next.
LINE = 17


class Drawing:
    """A picture of ``width`` by ``height`` units; ``title`` says in words what it shows, to who does not see it."""

    def __init__(self, name: str, width: int, height: int, title: str) -> None:
        self._name = name
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, head: str = "", *lines: str, kind: str = "plain") -> None:
        """A box with a bold line and further ones, in the middle; of the kinds ``plain``, ``process``, ``memory``, ``area``."""
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        if kind == "area":
            if head:
                self.words(x + 10, y + 18, head, kind="area", anchor="start")
            return
        shown = [head, *lines] if head else list(lines)
        top = y + height / 2 - (len(shown) - 1) * LINE / 2 + 4.5
        for number, line in enumerate(shown):
            self.words(x + width / 2, top + number * LINE, line, kind="head" if head and number == 0 else "line")

    def words(self, x: float, y: float, text: str, *, kind: str = "line", anchor: str = "middle") -> None:
        """A line of text; of the kinds ``head``, ``line``, ``note``, ``code``."""
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(
        self, *points: tuple[int, int], label: str = "", at: tuple[int, int] | None = None, kind: str = "", both: bool = False
    ) -> None:
        """A line over the points, with a head at its end (at both ends); ``kind`` may be ``dashed`` or ``fds``."""
        path = " ".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(points))
        mark = f"url(#{self._name}-head{'-fds' if kind == 'fds' else ''})"
        start = f' marker-start="{mark}"' if both else ""
        self._parts.append(f'<path class="arrow {kind}" d="{path}" marker-end="{mark}"{start}/>')
        if label:
            (x0, y0), (x1, y1) = points[0], points[-1]
            x, y = at or ((x0 + x1) // 2, (y0 + y1) // 2 - 6)
            self.words(x, y, label, kind="note")

    def svg(self) -> str:
        """The picture."""
        width, height = self._size
        heads = "".join(
            f'<marker id="{self._name}-head{suffix}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path class="tip{suffix}" d="M0 0L8 4L0 8z"/></marker>'
            for suffix in ("", "-fds")
        )
        return (
            f'<svg class="drawing" role="img" viewBox="0 0 {width} {height}" style="max-width:{width}px" '
            f'aria-labelledby="{self._name}-title"><title id="{self._name}-title">{escape(self._title)}</title>'
            f"<defs>{heads}</defs>{''.join(self._parts)}</svg>"
        )
