"""What all benchmarks share: options, times taken in turns, goals, and the report with the facts of its run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Options.

Json = Annotated[Path | None, typer.Option("--json", help="Where to write the numbers; benchmarks/results/<name>.json.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Shape = Annotated[str | None, typer.Option(help="llama-3-8b (on a GPU by default), small (on the host by default) or tiny.")]


def numbers(text: str) -> list[int]:
    """Read numbers with commas between them.

    :raises typer.BadParameter: if it has something else.
    """
    try:
        return [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: use numbers with commas between them, such as 10,100") from None


def chosen(device: str, shape: str | None = None) -> tuple[str, str]:
    """Return the device and the shape of a run: for ``"auto"`` the GPU if there is one, and the default shape of the device."""
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, shape or ("llama-3-8b" if device == "cuda" else "small")


# Times.

#: Calls before those that count, in each turn: the side before has filled the caches.
_WARM_UP = 10


class Sample:
    """Times in seconds, grouped by the turn in which they were taken."""

    def __init__(self, rounds: Iterable[Iterable[float]]) -> None:
        self.rounds = [list(times) for times in rounds]
        self._sorted = sorted(seconds for times in self.rounds for seconds in times)
        if not self._sorted:
            raise ValueError("a sample without a single time")

    def quantile(self, share: float) -> float:
        """Return the time that ``share`` of all times (0 to 1) do not exceed."""
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]

    @property
    def p50(self) -> float:
        """The median of all times."""
        return statistics.median(self._sorted)

    @property
    def p99(self) -> float:
        """The time that 99 % do not exceed."""
        return self.quantile(0.99)

    def as_json(self) -> dict[str, Any]:
        """Return counts and percentiles in seconds, with the median of every turn, which shows how steady the machine was."""
        return {
            "n": len(self._sorted),
            "min": self._sorted[0],
            "p50": self.p50,
            "p90": self.quantile(0.9),
            "p99": self.p99,
            "max": self._sorted[-1],
            "p50_of_rounds": [statistics.median(times) for times in self.rounds if times],
        }


def timed(action: Callable[[], object]) -> float:
    """Measure the seconds of an action; its result is dropped within them."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def interleaved(
    actions: Mapping[str, Callable[[], object]], *, rounds: int, calls: int, warm_up: int = _WARM_UP
) -> dict[str, Sample]:
    """Time every action ``calls`` times in each of ``rounds`` turns: A B C A B C."""
    times: dict[str, list[list[float]]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            for _ in range(min(warm_up, calls)):
                action()
            times[name].append([timed(action) for _ in range(calls)])
    return {name: Sample(taken) for name, taken in times.items()}


# Goals.


Unit = Literal["s", "bytes", "ratio", "number"]


class Goal(NamedTuple):
    """A limit of a measured value, and its text for people. ``unit`` is that of the row if it is None."""

    text: str
    limit: float
    unit: Unit | None = None
    kind: Literal["at most", "below", "at least"] = "at most"

    def met(self, measured: float) -> bool:
        """Return whether a measurement meets the goal."""
        if self.kind == "at least":
            return measured >= self.limit
        return measured < self.limit if self.kind == "below" else measured <= self.limit


_MIB = 1 << 20

GOALS = {
    "attach_first": Goal("≤ 8 ms (16 GB, GPU)", 8e-3),
    "attach_again": Goal("≤ 4 ms (16 GB, GPU)", 4e-3),
    "from_nothing": Goal("≤ 40 ms (host)", 40e-3),
    "from_nothing_gpu": Goal("≤ 60 ms (GPU)", 60e-3),
    # "Flat" as a number: the machine's own noise is allowed for.
    "attach_bytes": Goal("flat: ≤ 1.25 x", 1.25, "ratio"),
    "attach_tensor": Goal("≤ 25 µs a tensor", 25e-6),
    "publish_peak": Goal("≤ 3 GiB + largest tensor", 3 << 30, "bytes"),
    "client_memory": Goal("< 4 MiB (GPU)", 4 * _MIB, "bytes", "below"),
    "ping": Goal("≤ 2 x raw echo", 2.0, "ratio"),
    "small_tensor": Goal("≤ 120 µs (GPU)", 120e-6),
    "large_argument": Goal("≤ 0.5 ms (64 MiB, GPU)", 0.5e-3),
    "task": Goal("≤ 6 x raw echo", 6.0, "ratio"),
    "concurrent": Goal("≤ 1/3 of one by one", 1 / 3, "ratio"),
    "throughput": Goal("≥ 4 x shared-tensor (GPU)", 4.0, "ratio", "at least"),
    "long_run": Goal("as after the first 100", 0),
    "kept_memory": Goal("12,000 of them ≤ 100 MiB", 100 * _MIB, "bytes"),
    "kept_fds": Goal("≤ 400", 400, "number"),
    "tasks_memory": Goal("10,000 of them < 30 MiB", 30 * _MIB, "bytes", "below"),
    "import": Goal("≤ 60 ms", 60e-3),
    "ls": Goal("≤ 0.2 s", 0.2),
    "idle": Goal("≤ 1.5 x of none", 1.5, "ratio"),
    "one_copy": Goal("one copy: < 5 % of it each", 0.05, "ratio", "below"),
    "attach_gap": Goal("none", 0, "number"),
    "attach_p99": Goal("≤ 2 x before", 2.0, "ratio"),
    "worker": Goal("≤ own imports + 0.4 s", 0.4),
    # Beyond the start of an interpreter that does nothing.
    "start": Goal("≤ python + 0.3 s (host)", 0.3),
    "start_gpu": Goal("≤ python + 0.8 s (GPU)", 0.8),
    "channel": Goal("≤ 1.3 x two copies", 1.3, "ratio"),
    "bucket": Goal("≤ 200 µs", 200e-6),
    "syncs": Goal("none", 0, "number"),
    "cluster_move": Goal("≤ 2 x Ray's", 2.0, "ratio"),
    "sleep": Goal("≤ 20 ms (16 GB, GPU)", 20e-3),
    "wake": Goal("≤ 1.15 x a plain copy (GPU)", 1.15, "ratio"),
    # "Flat" as a share of one copy: what each engine adds.
    "engines": Goal("flat: < 5 % of a copy each", 0.05, "ratio", "below"),
    "broker": Goal("≤ 40 MiB", 40 * _MIB, "bytes"),
    "broker_gpu": Goal("none: no GPU memory", 0, "number"),
    "killed": Goal("as before", 0, "number"),
    "given_back": Goal("all given back", 0, "bytes"),
    # Python's allocator keeps some of what the connections needed, for the next ones.
    "killed_memory": Goal("as before, ± 1 MiB", _MIB, "bytes"),
}

# Reports.

OURS, ECHO = "shared_rpc", "raw echo"
#: Columns of a table where there is no terminal: for three subjects, and for each further one.
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
    """One measurement of all sides that took part.

    ``values`` are by side, in ``unit``. ``judged`` is the value that is compared with the goal; None if the goal is about
    another machine or size than this one. ``texts`` are the cells of sides without a number.
    """

    name: str
    values: dict[str, float]
    unit: Unit = "s"
    goal: Goal | None = None
    judged: float | None = None
    samples: dict[str, Sample] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none for what was measured."""
        return None if self.goal is None or self.judged is None else self.goal.met(self.judged)

    def cell(self, subject: str) -> str:
        """Format a side's value, with its ratio to the raw echo of the same run."""
        if subject not in self.values:
            return self.texts.get(subject, "")
        value = shown(self.values[subject], self.unit)
        echo = self.values.get(ECHO)
        if not echo or subject == ECHO:
            return value
        ratio = self.values[subject] / echo
        return f"{value} ({ratio:,.0f} x)" if ratio >= 100 else f"{value} ({ratio:.3g} x)"

    def measured(self) -> str:
        """Format the value that is compared with the goal."""
        return "" if self.goal is None or self.judged is None else shown(self.judged, self.goal.unit or self.unit)

    def as_json(self) -> dict[str, Any]:
        """Return the row for JSON, with the ratios of every two sides."""
        names = list(self.values)
        return {
            "name": self.name,
            "unit": self.unit,
            "values": self.values,
            "ratios": {
                f"{one} / {other}": self.values[one] / self.values[other]
                for position, one in enumerate(names)
                for other in names[:position]
                if self.values[other]
            },
            "samples": {subject: sample.as_json() for subject, sample in self.samples.items()},
            "texts": self.texts,
            "goal": self.goal.text if self.goal is not None else None,
            "measured": self.judged,
            "met": self.met,
            **self.extra,
        }


class Report:
    """All rows of one benchmark.

    :param divided: whether servers have one half of the cores and measuring processes the other.
    """

    def __init__(self, name: str, title: str, subjects: list[str], *, divided: bool = True) -> None:
        self.name = name
        self.title = title
        self.subjects = subjects
        self.divided = divided
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def row(
        self,
        name: str,
        values: Mapping[str, Sample | float],
        unit: Unit = "s",
        goal: str = "",
        judged: float | None = None,
        texts: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> None:
        """Add a row. The value of a sample is its median; ``goal`` is a name of :data:`GOALS`."""
        samples = {who: value for who, value in values.items() if isinstance(value, Sample)}
        medians = {who: value.p50 if isinstance(value, Sample) else value for who, value in values.items()}
        limit = GOALS[goal] if goal else None
        self.rows.append(Row(name, medians, unit, limit, judged, samples, dict(texts or {}), extra))

    def note(self, text: str | None) -> None:
        """Add a line below the table, once; None is nothing."""
        if text is not None and text not in self.notes:
            self.notes.append(text)

    def finish(self, path: Path | None) -> None:
        """Print the table and write the JSON, to ``benchmarks/results/<name>.json`` by default."""
        path = path if path is not None else Path(__file__).parent / "results" / f"{self.name}.json"
        machine = facts()
        self._print(machine["host"])
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row.as_json() for row in self.rows]
        content = {"benchmark": self.name, "title": self.title, **machine, "rows": rows, "notes": self.notes}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        print(f"\nwritten to {path}")

    def _print(self, host: dict[str, Any]) -> None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH + _FURTHER * max(len(self.subjects) - 3, 0))
        table = Table(title=self.title, title_justify="left", header_style="bold", box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        for subject in self.subjects:
            table.add_column(subject, justify="right")
        for column in ("goal", "measured", "met"):
            table.add_column(column)
        for row in self.rows:
            met = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}[row.met]
            goal = row.goal.text if row.goal is not None else ""
            cells = [row.name, *map(row.cell, self.subjects), goal, row.measured()]
            table.add_row(*map(Text, cells), met)
        console.print(table)
        console.print()
        gpu = f", {host['gpu']} (driver {host['driver']})" if host["gpu"] else ""
        text = f"{host['cores']} cores{gpu}, Python {host['python']}, torch {host['torch']}, load {host['load']:.2f}"
        text += "; servers on one half of the cores, measuring processes on the other" if self.divided else ""
        for line in (text, *self.notes):
            console.print(Text(line), highlight=False)


_PACKAGES = ("torch", "shared-rpc", "shared-tensor", "uvloop", "cuda-bindings", "ray")


def facts() -> dict[str, Any]:
    """Return ``date`` (UTC), ``command``, and ``host``: cores, load, versions, GPU and driver (None without one)."""
    gpu, driver = _gpu()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "host": {
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],  # of the last minute: shows what else ran
            "kernel": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            **{name.replace("-", "_"): _version(name) for name in _PACKAGES},
            "gpu": gpu,
            "driver": driver,
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> tuple[str | None, str | None]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None, None
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    name, _, driver = answer.stdout.partition("\n")[0].partition(", ")
    return (name, driver) if answer.returncode == 0 and name else (None, None)
