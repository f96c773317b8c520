"""Common parts of the benchmarks: options, times measured in turns, goals, and a run with its servers, table and JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from unittest import mock

import typer

from benchmarks.processes import Process, on_cores
from shared_rpc import Client
from shared_rpc.cli import rendering

T = TypeVar("T")

_ROOT = str(Path(__file__).parent.parent)
#: Timeout of every step, in seconds.
PATIENCE = 300.0
#: The app of a broker: all endpoints.
APP = """
from benchmarks.workload import Workload
from shared_rpc import Provider

provider = Provider(device={device!r})
Workload({device!r}).share(provider)
"""

# Options.

Json = Annotated[Path | None, typer.Option("--json", help="File for the results; by default benchmarks/results/<name>.json.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Shape = Annotated[str | None, typer.Option(help="llama-3-8b (the default on a GPU), small (the default on the host) or tiny.")]


def numbers(text: str) -> list[int]:
    """Parse numbers separated by commas.

    :raises typer.BadParameter: if the text contains anything else.
    """
    try:
        return [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r}: use numbers separated by commas, such as 10,100") from None


def chosen(device: str, shape: str | None = None) -> tuple[str, str]:
    """Return the device and the shape of a run; ``"auto"`` selects a GPU if available, None the default shape of the device."""
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, shape or ("llama-3-8b" if device == "cuda" else "small")


# Times.


class Sample:
    """Times in seconds, or other numbers, grouped by turn."""

    def __init__(self, *turns: Sequence[float]) -> None:
        self.turns = turns
        self._sorted = sorted(itertools.chain(*turns))

    def quantile(self, share: float) -> float:
        """Return the quantile for ``share`` (0 to 1)."""
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self._sorted)

    @property
    def p99(self) -> float:
        """The 99th percentile."""
        return self.quantile(0.99)

    def as_json(self) -> dict[str, Any]:
        """Return count, percentiles, and the median of every turn, which shows how steady the machine was."""
        return {
            "n": len(self._sorted),
            "min": self._sorted[0],
            "p50": self.p50,
            "p90": self.quantile(0.9),
            "p99": self.p99,
            "max": self._sorted[-1],
            "p50_of_rounds": [statistics.median(times) for times in self.turns if times],
        }


def timed(action: Callable[[], object]) -> float:
    """Measure the seconds of an action, including the release of its result."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def wait_for(read: Callable[[], T], condition: Callable[[T], bool], period: float) -> T:
    """Poll until a value meets the condition, and return it.

    :raises TimeoutError: with the last value, after :data:`PATIENCE`.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition(found := read()):
        if time.monotonic() > deadline:
            raise TimeoutError(str(found))
        time.sleep(period)
    return found


def interleaved(
    actions: Mapping[str, Callable[[], object]], *, rounds: int, calls: int, warm_up: int = 10
) -> dict[str, Sample]:
    """Time every action ``calls`` times in each of ``rounds`` turns: A B C A B C.

    :param warm_up: unmeasured calls at the start of each turn, because the previous side has filled the caches.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            for _ in range(min(warm_up, calls)):
                action()
            times[name].append([timed(action) for _ in range(calls)])
    return {name: Sample(*taken) for name, taken in times.items()}


# Rows.

OURS, ECHO = "shared_rpc", "raw echo"

Unit = Literal["s", "bytes", "ratio", "number"]


class Times(defaultdict[tuple[str, str], list[float]]):
    """Seconds by row and side."""

    def __init__(self) -> None:
        super().__init__(list)

    @contextmanager
    def of(self, row: str, side: str = OURS) -> Iterator[None]:
        """Measure the block."""
        begin = time.perf_counter()
        yield
        self[row, side].append(time.perf_counter() - begin)

    def samples(self, row: str) -> dict[str, Sample]:
        """Return the times of a row, by side."""
        return {side: Sample(taken) for (found, side), taken in self.items() if found == row}


def shown(value: float | str, unit: Unit) -> str:
    """Format a number: ``"1.24 ms"``, ``"3.0 MiB"``, ``"1.52 x"``; a text stays."""
    if isinstance(value, str):
        return value
    match unit:
        case "s":
            return rendering.span(value)
        case "bytes":
            return rendering.size(int(value))
        case "ratio":
            return f"{value:.3g} x"
        case "number":
            return f"{value:.6g}"


class Goal(NamedTuple):
    """A limit of a measured value.

    :param about: the machine or case to which the goal applies.
    :param unit: of the limit; None for the unit of the row.
    :param of: a side; the limit is a multiple of its value in the row.
    """

    sign: Literal["≤", "≥"]
    limit: float
    about: str = ""
    unit: Unit | None = None
    of: str = ""

    def met(self, measured: float) -> bool:
        """Return whether a measurement meets the goal."""
        return measured <= self.limit if self.sign == "≤" else measured >= self.limit

    def text(self, unit: Unit) -> str:
        """Format the goal: ``"≤ 2 x raw echo"``, ``"≤ 8 ms (16 GB, GPU)"``."""
        return f"{self.sign} {shown(self.limit, unit)}{self.of and ' ' + self.of}{self.about and f' ({self.about})'}"


Value = float | str | Sample


class Row(NamedTuple):
    """One measurement of all sides, with the fields of the JSON.

    :param values: by side: numbers in ``unit``, or texts.
    :param measured: the value compared with the goal; None without the side of which the goal is a multiple.
    """

    name: str
    unit: Unit
    values: dict[str, float | str]
    samples: dict[str, dict[str, Any]]
    goal: str | None
    measured: float | None
    measured_unit: Unit
    met: bool | None

    def cell(self, side: str) -> str:
        """Format the value of a side, with its ratio to the raw echo of the same row."""
        value, echo = self.values.get(side, ""), self.values.get(ECHO, "")
        text = shown(value, self.unit)
        if side != ECHO and not isinstance(value, str) and not isinstance(echo, str):
            text += f" ({shown(value / echo, 'ratio')})"
        return text


# The run.


class Run:
    """A run of one benchmark: a folder, servers that are stopped at the end of the block, and rows that are then printed and
    written.

    :param sides: the columns of the table.
    :param device: of the servers.
    :param json: file for the results; None for ``benchmarks/results/<name>.json``.
    :param pinned: whether servers and measuring processes have one half of the cores each.
    """

    def __init__(
        self, name: str, title: str, sides: Sequence[str], device: str = "cpu", json: Path | None = None, *, pinned: bool = True
    ) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.device = device
        self.cores = frozenset(os.sched_getaffinity(0))
        ordered = sorted(self.cores)
        # A single core is used by both, as all are if they are not pinned.
        middle = len(ordered) // 2 if pinned else 0
        self._client_cores, self.server_cores = frozenset(ordered[:middle] or ordered), frozenset(ordered[middle:])
        self._name, self._title, self._sides, self._pinned = name, title, sides, pinned
        self._path = json if json is not None else Path(__file__).parent / "results" / f"{name}.json"
        self._stack = ExitStack()

    def __enter__(self) -> Run:
        self._stack.enter_context(mock.patch.dict(os.environ, _environ(), clear=True))
        self._stack.enter_context(on_cores(self._client_cores))
        # A short prefix, because a socket address is limited to 107 bytes.
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        # A separate folder, because 'ls' connects to every socket of a folder.
        (self.folder / "ours").mkdir(mode=0o700)
        self.base_path = str(self.folder / "ours" / "s")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is None:
            self._finish()

    def process(self, make: Callable[..., Any], **config: Any) -> Process:
        """Start a :class:`Process`, which is closed at the end of the block."""
        return self._stack.enter_context(Process(make, **config))

    def processes(self, count: int, make: Callable[..., Any], **config: Any) -> list[Process]:
        """Start ``count`` processes concurrently, and wait until all are ready."""
        started = [self.process(make, **config) for _ in range(count)]
        return [process.ready() for process in started]

    def python(self, *words: str, cores: Set[int] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start Python with these arguments in the folder, on these cores or this process's own."""
        with on_cores(cores or os.sched_getaffinity(0)):
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
            return subprocess.Popen([sys.executable, *words], cwd=self.folder, **{**streams, **options})

    def program(self, *words: str, cores: Set[int] | None = None) -> str:
        """Run a Python program as :meth:`python` starts it, and return its output."""
        with self.python(*words, cores=cores) as process:
            output, _ = process.communicate(timeout=PATIENCE)
        if process.returncode:
            raise RuntimeError(f"python {words} ended with exit code {process.returncode}; see above")
        return output

    @contextmanager
    def broker(
        self, app: str = APP, *options: str, name: str = "app", variables: Mapping[str, str] | None = None
    ) -> Iterator[Client]:
        """Run ``shared-rpc serve`` on an app, after replacing ``{device!r}`` in it; yield a client when it serves."""
        (self.folder / "app.py").write_text(app.format(device=self.device))
        socket = f"{self.base_path}-{name}.sock"
        words = ("-m", "shared_rpc.cli", "serve", "app.py", "--socket", socket, *options)
        environ = {**os.environ, **(variables or {})}
        with self.python(*words, cores=self.server_cores, env=environ, stderr=subprocess.DEVNULL) as process:
            try:
                assert process.stdout is not None, "stdout is a pipe"
                if "serving" not in process.stdout.readline():
                    raise RuntimeError(f"the broker ended with exit code {process.wait()}: run 'shared-rpc serve' on the app")
                with Client(socket_path=socket, timeout=PATIENCE) as client:
                    yield client
            finally:
                process.terminate()

    def row(
        self,
        name: str,
        values: Value | Mapping[str, Value],
        unit: Unit = "s",
        goal: Goal | None = None,
        *,
        measured: float | None = None,
    ) -> None:
        """Add a row.

        :param values: by side; a single value is ours.
        :param goal: None if it applies to another machine or size.
        :param measured: the value compared with the goal; None for our value, or its ratio to that of another side.
        """
        given = values if isinstance(values, Mapping) else {OURS: values}
        medians = {side: value.p50 if isinstance(value, Sample) else value for side, value in given.items()}
        samples = {side: value.as_json() for side, value in given.items() if isinstance(value, Sample)}
        if goal is None:
            self.rows.append(Row(name, unit, medians, samples, None, None, unit, None))
            return
        in_unit: Unit = "ratio" if goal.of else goal.unit or unit
        if measured is None and (other := medians.get(goal.of) if goal.of else 1):
            measured = float(medians[OURS]) / float(other)
        met = None if measured is None else goal.met(measured)
        self.rows.append(Row(name, unit, medians, samples, goal.text(in_unit), measured, in_unit, met))

    def note(self, text: str | None) -> None:
        """Add a line below the table, once; None adds none."""
        if text is not None and text not in self.notes:
            self.notes.append(text)

    def _finish(self) -> None:
        """Print the table and write the JSON."""
        machine = facts()
        columns: dict[str, Callable[[Row], object]] = {
            "": lambda row: row.name,
            **{f"{side}>": partial(Row.cell, side=side) for side in self._sides},
            "goal": lambda row: row.goal or "",
            "measured": lambda row: "" if row.measured is None else shown(row.measured, row.measured_unit),
            "met": lambda row: {True: "yes", False: "no", None: ""}[row.met],
        }
        rendering.listing(self._title, self.rows, columns)
        host = machine["host"]
        gpu = f", {host['gpu']} (driver {host['driver']})" if host["gpu"] else ""
        text = f"{host['cores']} cores{gpu}, Python {host['python']}, torch {host['torch']}, load {host['load']:.2f}"
        text += "; servers on one half of the cores, measuring processes on the other" if self._pinned else ""
        print("", text, *self.notes, sep="\n")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row._asdict() for row in self.rows]
        content = {"benchmark": self._name, "title": self._title, **machine, "rows": rows, "notes": self.notes}
        self._path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        print(f"\nwritten to {self._path}")


_PACKAGES = ("torch", "shared_rpc", "shared_tensor", "uvloop", "cuda_bindings", "ray")


def facts() -> dict[str, Any]:
    """Return ``date`` (UTC), ``command``, and ``host``: cores, load, versions, GPU and driver (None without one)."""
    gpu, driver = _gpu()
    versions = {package.name.replace("-", "_"): package.version for package in importlib.metadata.distributions()}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "host": {
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],  # of the last minute, which shows other work on the machine
            "kernel": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            **{name: versions.get(name) for name in _PACKAGES},
            "gpu": gpu,
            "driver": driver,
        },
    }


def _gpu() -> tuple[str | None, str | None]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    name, _, driver = answer.partition("\n")[0].partition(", ")
    return name, driver


def _environ() -> dict[str, str]:
    """Return this process's environment with this package importable, and without roles and paths."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHARED_TENSOR_")}
    clean["PYTHONPATH"] = os.pathsep.join(path for path in (_ROOT, clean.get("PYTHONPATH", "")) if path)
    # As for an installed package: without bytecode every import would compile.
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    # shared-tensor logs every start and stop by default.
    clean["SHARED_TENSOR_LOG_LEVEL"] = "ERROR"
    return clean
