"""Reports: a table for people and JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.facts import facts
from benchmarks.stats import Sample
from benchmarks.targets import Goal

__all__ = ["Report", "Row", "Unit", "shown", "size"]

Unit = Literal["s", "bytes", "ratio", "number"]

ECHO = "raw echo"
#: Columns that a table needs where nobody says how wide the screen is: for three subjects, and for each further one.
_WIDTH, _FURTHER = 165, 22


def shown(value: float, unit: Unit) -> str:
    """Format a number: ``"1.24 ms"``, ``"3.0 MiB"``, ``"1.52 x"``."""
    if unit == "s":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value / 1e-6:.2g} µs"
    if unit == "bytes":
        for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if abs(value) >= 1 << shift:
                return f"{value / (1 << shift):.1f} {name}"
        return f"{value:.0f} B"
    return f"{value:.2f} x" if unit == "ratio" else f"{value:.6g}"


def size(nbytes: int) -> str:
    """Format the size of a model, in decimal units: ``"16.06 GB"``, ``"0.41 MB"``."""
    return f"{nbytes / 1e9:.4g} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.3g} MB"


@dataclass
class Row:
    """One measurement, of everybody who took part.

    ``values`` are by subject, in ``unit``. ``judged`` is what the goal is about; None where the goal is about another
    machine or size than this one, and is only printed. ``texts`` are cells for those who have no number.
    """

    name: str
    values: dict[str, float]
    unit: Unit = "s"
    goal: Goal | None = None
    judged: float | None = None
    judged_unit: Unit | None = None
    samples: dict[str, Sample] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none for what was measured."""
        return None if self.goal is None or self.judged is None else self.goal.met(self.judged)

    def ratios(self) -> dict[str, float]:
        """Compute the ratios of every two subjects: ``{"shared_rpc / raw echo": 1.6}``. Empty with a single subject."""
        names = list(self.values)
        return {
            f"{one} / {other}": self.values[one] / self.values[other]
            for position, one in enumerate(names)
            for other in names[:position]
            if self.values[other]
        }

    def cell(self, subject: str) -> str:
        """Format a subject's value, with its ratio to the raw echo of the same run."""
        if subject not in self.values:
            return self.texts.get(subject, "")
        value = shown(self.values[subject], self.unit)
        echo = self.values.get(ECHO)
        if not echo or subject == ECHO:
            return value
        ratio = self.values[subject] / echo
        return f"{value} ({ratio:,.0f} x)" if ratio >= 100 else f"{value} ({ratio:.3g} x)"

    def measured(self) -> str:
        """Value that is compared with the goal."""
        return "" if self.goal is None or self.judged is None else shown(self.judged, self.judged_unit or self.unit)

    def as_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "values": self.values,
            "ratios": self.ratios(),
            "samples": {subject: sample.as_json() for subject, sample in self.samples.items()},
            "texts": self.texts,
            "goal": self.goal.text if self.goal is not None else None,
            "measured": self.judged,
            "met": self.met,
            **self.extra,
        }


class Report:
    """All rows of one benchmark.

    :param divided: whether servers have one half of the cores and those who measure the other.
    """

    def __init__(self, name: str, title: str, subjects: list[str], *, divided: bool = True) -> None:
        self.name = name
        self.title = title
        self.subjects = subjects
        self.divided = divided
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def add(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)

    def sampled(self, name: str, samples: Mapping[str, Sample], goal: Goal | None = None, judged: float | None = None) -> None:
        """Add a row of medians."""
        values = {subject: sample.p50 for subject, sample in samples.items()}
        self.add(Row(name, values, goal=goal, judged=judged, samples=dict(samples)))

    def note(self, text: str | None) -> None:
        """Add a line below the table, once; None is nothing."""
        if text is not None and text not in self.notes:
            self.notes.append(text)

    def finish(self, path: Path | None) -> None:
        """Print the table and write the JSON, to ``benchmarks/results/<name>.json`` by default."""
        path = path if path is not None else Path(__file__).parent / "results" / f"{self.name}.json"
        machine = facts()
        self._print(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.name,
            "title": self.title,
            **machine,
            "rows": [row.as_json() for row in self.rows],
            "notes": self.notes,
        }
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        print(f"\nwritten to {path}")

    def _print(self, machine: dict[str, Any]) -> None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH + _FURTHER * max(len(self.subjects) - 3, 0))
        table = Table(title=self.title, title_justify="left", header_style="bold", box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        for subject in self.subjects:
            table.add_column(subject, justify="right")
        table.add_column("goal")
        table.add_column("measured", justify="right")
        table.add_column("met")
        for row in self.rows:
            met = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}[row.met]
            cells = [Text(row.name), *(Text(row.cell(subject)) for subject in self.subjects)]
            table.add_row(*cells, Text(row.goal.text if row.goal is not None else ""), Text(row.measured()), met)
        console.print(table)
        console.print()
        host = machine["host"]
        gpu = f", {host['gpu']} (driver {host['driver']})" if host["gpu"] else ""
        text = f"{host['cores']} cores{gpu}, Python {host['python']}, torch {host['torch']}, load {host['load']:.2f}"
        text += "; servers on one half of the cores, those who measure on the other" if self.divided else ""
        for line in (text, *self.notes):
            console.print(Text(line), highlight=False)
