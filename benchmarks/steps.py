"""Numbers of the package's functions that are called for one request: in the client, in the broker and in its worker."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import Json
from benchmarks.processes import environ
from benchmarks.report import Report, Row
from benchmarks.targets import GOALS
from benchmarks.traced import install, pause, site
from shared_rpc import Client

__all__ = ["run"]

_APP = """
import torch

from shared_rpc import Provider

provider = Provider()


@provider.share(cache=False)
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@provider.share(managed=True)
def model() -> torch.nn.Module:
    return torch.nn.Linear(16, 16)
"""
#: Seconds without a call after which a request has been seen to in all processes.
_QUIET = 0.05
#: Seconds that the broker has to serve.
_PATIENCE = 60.0
_ROLES = ("client", "broker", "worker")


def run(
    rounds: Annotated[int, typer.Option(help="Requests of each kind.")] = 15,
    names: Annotated[bool, typer.Option("--names", help="Print the functions as well.")] = False,
    json: Json = None,
) -> None:
    """Python calls of the package for one request, in client, broker and worker. On host memory."""
    import torch

    report = Report("steps", "Python calls of the package for one request", [*_ROLES, "in all"])
    report.note(f"medians of {rounds} requests, each after others like it; Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        with _broker(folder) as base_path, Client(base_path, device="cpu") as client:
            info = client.get_server_info()
            pids = dict(zip(_ROLES, (os.getpid(), info["pid"], info["workers"][0]["pid"]), strict=True))
            install(str(folder))
            tensor = torch.ones(1024)
            handles = [client.call("model")]
            results: list[object] = []

            def call() -> None:
                # As in a loop: what the one before has brought goes with the next request, and not in one of its own.
                results.clear()
                results.append(client.call("double", tensor))

            requests: dict[str, tuple[str, Callable[[], object]]] = {
                "steps_call": ("double(tensor), not cached", call),
                "steps_managed": ("model(), cached and managed", lambda: handles.append(client.call("model"))),
                "steps_ping": ("ping", client.ping),
            }
            for goal, (what, request) in requests.items():
                traces = [_trace(folder, pids, request) for _ in range(rounds + 2)][2:]  # the first ones find things new
                counts = {role: statistics.median(trace[role].total() for trace in traces) for role in _ROLES}
                counts["in all"] = statistics.median(sum(trace[role].total() for role in _ROLES) for trace in traces)
                report.add(Row(what, counts, "number", goal=GOALS[goal], judged=counts["in all"], judged_unit="number"))
                if names:
                    _print(what, traces[-1])
            sys.setprofile(None)
            for handle in handles:
                handle.release()
    report.finish(json)


@contextmanager
def _broker(folder: Path) -> Iterator[str]:
    """Start a broker whose processes have the hook."""
    (folder / "app.py").write_text(_APP)
    base_path = str(folder / "s")
    words = ["serve", str(folder / "app.py"), "--no-preload", "--base-path", base_path, "--device", "cpu"]
    environment = environ() | site(folder)
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, "-m", "shared_rpc.cli", *words], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None, "it is a pipe"
        if not process.stdout.readline().startswith("serving"):
            raise RuntimeError("the broker of the benchmark did not begin; see above")
        yield base_path
    finally:
        process.terminate()
        process.wait(_PATIENCE)


def _trace(folder: Path, pids: dict[str, int], request: Callable[[], object]) -> dict[str, Counter[str]]:
    """Return the functions that are called for a request, in each process."""
    files = {role: folder / str(pid) for role, pid in pids.items()}
    go_on = pause()
    sizes = _quiet(files)
    go_on()
    request()
    go_on = pause()
    _quiet(files)
    called = {role: Counter(file.read_bytes()[sizes[role] :].decode().splitlines()) for role, file in files.items()}
    go_on()
    return called


def _quiet(files: dict[str, Path]) -> dict[str, int]:
    """Wait until no file has grown for a while, and return the sizes."""
    sizes: dict[str, int] = {}
    while True:
        before, sizes = sizes, {role: file.stat().st_size for role, file in files.items()}
        if sizes == before:
            return sizes
        time.sleep(_QUIET)


def _print(what: str, called: dict[str, Counter[str]]) -> None:
    for role, counter in called.items():
        print(f"\n{role}, {what}: {counter.total()}")
        for name, count in counter.items():
            print(f"  {count:3} {name}")
