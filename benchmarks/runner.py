"""Common parts of the benchmarks: options, times measured in turns, goals, and a run with its servers, table and JSON."""

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
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
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

Json = Annotated[Path | None, typer.Option("--json", help="File for the results; by default benchmarks/results/<name>.json.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Shape = Annotated[str | None, typer.Option(help="llama-3-8b (the default on a GPU), small (the default on the host) or tiny.")]


def numbers(text: str) -> list[int]:
    """Parse numbers separated by commas."""
    return [int(number) for number in text.split(",") if number]


def chosen(device: str, shape: str | None = None) -> tuple[str, str]:
    """Return the device and the shape of a run; ``"auto"`` selects a GPU if available, None the default shape of the device."""
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, shape or ("llama-3-8b" if device == "cuda" else "small")


class Sample(list[float]):
    """Times of one side in seconds, or other numbers."""

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self)

    @property
    def p99(self) -> float:
        """The 99th percentile."""
        return sorted(self)[min(int(0.99 * len(self)), len(self) - 1)]


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


def interleaved(actions: Mapping[str, Callable[[], object]], *, rounds: int, calls: int) -> dict[str, Sample]:
    """Time every action ``calls`` times in each of ``rounds`` turns: A B C A B C.

    Each turn begins with up to ten unmeasured calls, because the previous side has filled the caches.
    """
    times = {name: Sample() for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            for _ in range(min(10, calls)):
                action()
            times[name] += [timed(action) for _ in range(calls)]
    return times


OURS, ECHO = "shared_rpc", "raw echo"

Unit = Literal["s", "bytes", "ratio", "number"]


class Times(defaultdict[tuple[str, str], Sample]):
    """Seconds by row and side."""

    def __init__(self) -> None:
        super().__init__(Sample)

    @contextmanager
    def of(self, row: str, side: str = OURS) -> Iterator[None]:
        """Measure the block."""
        begin = time.perf_counter()
        yield
        self[row, side].append(time.perf_counter() - begin)

    def samples(self, row: str) -> dict[str, Sample]:
        """Return the times of a row, by side."""
        return {side: taken for (found, side), taken in self.items() if found == row}


_FORMATS: dict[Unit, Callable[[float], str]] = {
    "s": rendering.span,
    "bytes": lambda value: rendering.size(int(value)),
    "ratio": "{:.3g} x".format,
    "number": "{:.6g}".format,
}


def shown(value: float | str, unit: Unit) -> str:
    """Format a number: ``"1.24 ms"``, ``"3.0 MiB"``, ``"1.52 x"``; a text stays."""
    return value if isinstance(value, str) else _FORMATS[unit](value)


Value = float | str | Sample


class Run:
    """A run of one benchmark: a folder, servers that are stopped at the end of the block, and rows that are then printed and
    written.

    :param sides: the columns of the table; with ``base``, their ratios to that side.
    :param device: of the servers.
    :param json: file for the results; None for ``benchmarks/results/<name>.json``.
    :param pinned: whether servers and measuring processes have one half of the cores each.
    """

    def __init__(
        self,
        name: str,
        title: str,
        sides: Sequence[str],
        device: str = "cpu",
        json: Path | None = None,
        *,
        base: str = "",
        pinned: bool = True,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.device = device
        self.cores = frozenset(os.sched_getaffinity(0))
        ordered = sorted(self.cores)
        # A single core is used by both, as all are if they are not pinned.
        middle = len(ordered) // 2 if pinned else 0
        self._client_cores, self.server_cores = frozenset(ordered[:middle] or ordered), frozenset(ordered[middle:])
        self._name, self._title, self._sides, self._base, self._pinned = name, title, sides, base, pinned
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

    def program(self, *words: str, **variables: str) -> str:
        """Run a Python program as :meth:`python` starts it, with additional environment variables; return its output."""
        with self.python(*words, env={**os.environ, **variables}) as process:
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
        goal: float | None = None,
        of: str = "",
    ) -> None:
        """Add a row.

        :param values: by side, in ``unit``, or texts; a single value is ours.
        :param goal: the maximum of our value, None if it applies to another machine or size; with ``of``, a multiple of the
            value of that side.
        """
        given = values if isinstance(values, Mapping) else {OURS: values}
        samples = {side: value for side, value in given.items() if isinstance(value, Sample)}
        medians: dict[str, Any] = {**given, **{side: sample.p50 for side, sample in samples.items()}}
        self.rows.append(
            {
                "name": name,
                "unit": unit,
                "values": medians,
                "samples": {side: {"n": len(each), "p50": each.p50, "p99": each.p99} for side, each in samples.items()},
                "goal": None if goal is None else f"≤ {shown(goal, 'ratio' if of else unit)} {of}".rstrip(),
                "met": None if goal is None else medians[OURS] <= goal * (medians[of] if of else 1),
            }
        )

    def rows_of(self, times: Times) -> None:
        """Add a row for each name of the times, in the order of measurement."""
        for name in dict.fromkeys(name for name, _ in times):
            self.row(name, times.samples(name))

    def note(self, text: str | None) -> None:
        """Add a line below the table, once; None adds none."""
        if text is not None and text not in self.notes:
            self.notes.append(text)

    def _finish(self) -> None:
        """Print the table and write the JSON."""
        host = _host()
        cells = [
            [
                row["name"],
                *(self._cell(row, side) for side in self._sides),
                row["goal"] or "",
                {True: "yes", False: "no"}.get(row["met"], ""),
            ]
            for row in self.rows
        ]
        rendering.table(self._title, ["", *(f"{side}>" for side in self._sides), "goal", "met"], cells)
        gpu = f", {host['gpu']}" if host["gpu"] else ""
        text = f"{host['cores']} cores{gpu}, Python {host['python']}, torch {host['torch']}, load {host['load']:.2f}; medians"
        text += "; servers on one half of the cores, measuring processes on the other" if self._pinned else ""
        print("", text, *self.notes, sep="\n")
        content = {
            "benchmark": self._name,
            "title": self._title,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
            "host": host,
            "rows": self.rows,
            "notes": self.notes,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        print(f"\nwritten to {self._path}")

    def _cell(self, row: dict[str, Any], side: str) -> str:
        """Format the value of a side, with its ratio to that of the base."""
        value, base = row["values"].get(side, ""), row["values"].get(self._base)
        text = shown(value, row["unit"])
        if base and side != self._base and not isinstance(value, str):
            text += f" ({shown(value / base, 'ratio')})"
        return text


_PACKAGES = ("torch", "shared-rpc", "shared-tensor", "uvloop", "cuda-bindings", "ray")


def _host() -> dict[str, Any]:
    """Return cores, load, versions, and the GPU with its driver (empty without one)."""
    versions = {package.name: package.version for package in importlib.metadata.distributions()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout if shutil.which(query[0]) else ""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],  # of the last minute, which shows other work on the machine
        "python": platform.python_version(),
        **{name: versions.get(name) for name in _PACKAGES},
        "gpu": gpus.partition("\n")[0],
    }


def _environ() -> dict[str, str]:
    """Return this process's environment with this package importable, and without roles and paths."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SHARED_TENSOR_")}
    clean["PYTHONPATH"] = os.pathsep.join(path for path in (_ROOT, clean.get("PYTHONPATH", "")) if path)
    # As for an installed package: without bytecode every import would compile.
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    # shared-tensor logs every start and stop by default.
    clean["SHARED_TENSOR_LOG_LEVEL"] = "ERROR"
    return clean
