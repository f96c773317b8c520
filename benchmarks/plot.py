"""SVGs of what was measured, from the JSON that the benchmarks write and from nothing else.

They are drawn once, for light and dark pages: a transparent ground, and colours that stand out from both. Blue and orange are
told apart by everybody, and every series has a marker or a dash of its own as well. The same JSON gives the same bytes.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.echo import Echo
from benchmarks.ours import Ours
from benchmarks.peer import Peer

__all__ = ["Unplottable", "plot"]

Document = dict[str, Any]

#: Text, axes and what nobody is to look at first: 4.5 to 1 on white, and 4 to 1 on furo's dark ground.
_GREY = "#767676"
#: Of each side: its colour, marker and line.
_STYLES = {
    Ours.name: ("#1b84c6", "o", "-"),
    Peer.name: ("#d55e00", "s", "-"),
    Echo.name: (_GREY, "", "--"),
}
#: Inches of a panel, and characters of a caption in a figure of that many inches.
_WIDTH, _HEIGHT, _CHARACTERS = 6.4, 3.6, 15
#: Panels side by side have more room together, and less height each where one is below another.
_WIDER, _FLATTER = 1.4, 0.8
#: Rows of ``rpc`` whose distributions are drawn, by their beginning, and what they are called there.
_LATENCIES = {
    "ping, p50": "ping",
    "direct call, 4 KiB tensor, cached": "call, cached 4 KiB",
    "the same by an async def endpoint": "call, new 4 KiB (async def)",
    "managed call and release": "attach and release, 4 KiB",
}
#: Endpoints of ``clients``.
_ENDPOINTS = {"small": "a cached tensor", "fresh": "a new tensor", "fresh_on_loop": "a new tensor (async def)"}


class Unplottable(Exception):
    """A file that is no result of a benchmark, or of one that nothing is drawn of, or of an earlier release."""


@dataclass(frozen=True)
class Plot:
    """``name`` ends the file's name; ``draw`` draws into panels that are made for it.

    :param panels: what the panels are about, in order.
    """

    name: str
    title: str
    panels: Callable[[Document], Sequence[str]]
    draw: Callable[[Document, Sequence[Any]], None]


def plot(path: Path, folder: Path) -> list[Path]:
    """Draw all that there is to draw of a result, into ``<its name>-<plot>.svg``.

    :raises Unplottable: if there is nothing.
    """
    document = _read(path)
    drawn = []
    for each in _PLOTS[document["benchmark"]]:
        try:
            panels = each.panels(document)
            if not panels:
                continue
            with _figure(len(panels)) as (figure, axes):
                for axis, title in zip(axes, panels, strict=True):
                    axis.set_title(title, fontsize="medium", loc="left")
                each.draw(document, axes)
                # Above the panels: none has a corner that is free in every result.
                figure.legend(
                    *axes[0].get_legend_handles_labels(),
                    loc="outside upper left",
                    ncols=len(_STYLES),
                    title=each.title,
                    title_fontproperties={"weight": "bold", "size": "large"},
                    alignment="left",
                    borderpad=0,
                )
                figure.supxlabel(_caption(document, figure.get_figwidth()), x=0.01, ha="left", fontsize="x-small")
                target = folder / f"{path.stem}-{each.name}.svg"
                folder.mkdir(parents=True, exist_ok=True)
                # Neither the day nor the release of matplotlib: what changes is what was measured.
                figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        except (KeyError, TypeError) as error:
            raise Unplottable(
                f"{path} lacks {error}, which earlier releases did not write: run {document.get('command')}"
            ) from error
        drawn.append(target)
    if not drawn:
        raise Unplottable(f"{path} has no rows that are drawn; was {document['benchmark']!r} run without its sweeps?")
    return drawn


def _read(path: Path) -> Document:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unplottable(f"{path} cannot be read as JSON: {error}") from error
    name = document.get("benchmark") if isinstance(document, dict) else None
    if name not in _PLOTS:
        known = ", ".join(_PLOTS)
        raise Unplottable(f"{path}: nothing is drawn of {name!r}; give the JSON of 'python -m benchmarks' {known}")
    return dict(document)


@contextmanager
def _figure(panels: int) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Make a figure with panels side by side, two or three in a row, in the common style."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": "shared_rpc",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": _GREY,
        "axes.labelcolor": _GREY,
        "axes.edgecolor": _GREY,
        "axes.titlecolor": _GREY,
        "xtick.color": _GREY,
        "ytick.color": _GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": _GREY,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }
    columns = panels if panels < 4 else 2
    rows = -(-panels // columns)
    with mpl.rc_context(style):
        size = _WIDTH * (1 if columns == 1 else _WIDER), _HEIGHT * (1 if rows == 1 else rows * _FLATTER)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for spare in axes[panels:]:
            spare.set_axis_off()
        yield figure, list(axes[:panels])


def _caption(document: Document, inches: float) -> str:
    """Return place, time and command of the measurement, by the JSON."""
    host = document["host"]
    machine = host["gpu"] or "host memory"
    versions = ", ".join(f"{name} {host[key]}" for name, key in (("torch", "torch"), ("driver", "driver")) if host.get(key))
    text = (
        f"{machine}, {host['cores']} cores, Python {host['python']}, {versions}; {document['date'][:10]}; {document['command']}"
    )
    return "\n".join(textwrap.wrap(text, int(inches * _CHARACTERS)))


def _line(axis: Any, side: str, x: Sequence[float], y: Sequence[float], **options: Any) -> None:
    colour, marker, dash = _STYLES.get(side, (_GREY, "^", ":"))
    axis.plot(x, y, color=colour, **{"marker": marker, "linestyle": dash, "label": side, **options})


def _logarithmic(axis: Any) -> None:
    """Label an x or y axis with the numbers themselves: 1, 10, 100, and 2 and 5 between them where there is room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.10g}"))
    axis.set_minor_locator(NullLocator())


# Attach times.


def _sweep(over: str, key: str, scale: float, label: str) -> Plot:
    def rows(document: Document) -> list[Mapping[str, Any]]:
        return sorted((row for row in document["rows"] if row.get("sweep") == over), key=lambda row: float(row[key]))

    def panels(document: Document) -> Sequence[str]:
        found = rows(document)
        return [f"{found[0]['tensors']} tensors" if over == "bytes" else "4 KiB each"] if len(found) > 1 else []

    def draw(document: Document, axes: Sequence[Any]) -> None:
        (axis,) = axes
        for side in _STYLES:
            points = [(row[key] / scale, row["values"][side] * 1e3) for row in rows(document) if side in row["values"]]
            if points:
                _line(axis, side, *zip(*points, strict=True))
        _logarithmic(axis.xaxis)
        _logarithmic(axis.yaxis)
        axis.set_xlabel(label)
        axis.set_ylabel("attach again, p50 (ms)")

    title = f"Attaching a module, against its number of {over}"
    return Plot(over, title, panels, draw)


# Distributions.


def _latency_rows(document: Document) -> dict[str, Mapping[str, Any]]:
    rows = {title: [row for row in document["rows"] if row["name"].startswith(begin)] for begin, title in _LATENCIES.items()}
    return {title: found[0] for title, found in rows.items() if found}


def _draw_latencies(document: Document, axes: Sequence[Any]) -> None:
    shares = [100 * share for share in document["shares"]]
    for axis, row in zip(axes, _latency_rows(document).values(), strict=True):
        for side in _STYLES:
            if side in row["samples"]:
                times = [seconds * 1e6 for seconds in row["samples"][side]["quantiles"]]
                _line(axis, side, times[:-1], shares[:-1], marker="")  # the slowest one of all says little
        _logarithmic(axis.xaxis)
        axis.set_xlabel("time (µs)")
        axis.set_ylabel("calls done by then (%)")


# Throughput.


def _throughput_rows(document: Document) -> dict[str, list[Mapping[str, Any]]]:
    rows = {title: [row for row in document["rows"] if row.get("endpoint") == name] for name, title in _ENDPOINTS.items()}
    return {title: sorted(found, key=lambda row: int(row["processes"])) for title, found in rows.items() if found}


def _draw_throughput(document: Document, axes: Sequence[Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis, rows in zip(axes, _throughput_rows(document).values(), strict=True):
        for side in _STYLES:
            points = [(row["processes"], row["values"][side]) for row in rows if side in row["values"]]
            if points:
                _line(axis, side, *zip(*points, strict=True))
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("client processes")
        axis.set_ylabel("calls a second")


_PLOTS = {
    "attach": [
        _sweep("tensors", "tensors", 1, "tensors"),
        _sweep("bytes", "nbytes", 1e6, "megabytes"),
    ],
    "rpc": [
        Plot("latency", "How long calls take", lambda document: list(_latency_rows(document)), _draw_latencies),
    ],
    "clients": [
        Plot(
            "throughput",
            "Calls for 4 KiB a second, of all clients together",
            lambda document: list(_throughput_rows(document)),
            _draw_throughput,
        ),
    ],
}
