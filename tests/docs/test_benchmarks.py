"""Every benchmark command runs, with small sizes, on the host. Measurements need a quiet machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.runner import OURS
from tests.kit.processes import ROOT

#: The first tests wait for commands that wait for others.
pytestmark = pytest.mark.timeout(400)

#: The options of each command; the one that waits most begins first.
SMALL = {
    "recovery": "--device cpu --shape tiny --attaches 40 --rate 40 --kills 2 --restarts 1 --pace 1",
    "attach": "--device cpu --shape tiny --fresh 1 --repeats 2 --rounds 1 --tensors 2,100 --megabytes 1,2",
    "rpc": "--rounds 2 --calls 5 --processes 1 --megabytes 1 --kept 50 --long-run 50 --peers",
    "mechanisms": "--megabytes 2 --rounds 2",
    "channel": "--device cpu --megabytes 8 --slot 2 --rounds 2 --syncs 50",
    "records": "--device cpu --megabytes 8 --rounds 2",
    "tiers": "--megabytes 32 --rounds 2 --models 5 --engines 1,2",
    "starts": "--device cpu --shape tiny --starts 1",
    "clients": "--device cpu --clients 1,2 --replicas 2 --shape tiny --rounds 1",
    "scale": "--idle 0,5 --rounds 1 --calls 5 --killed 5 --shape tiny",
}


@dataclass
class Ended:
    """The output of a command, and the results that it wrote."""

    printed: str
    written: dict[str, Any]

    def row(self, beginning: str) -> dict[str, Any]:
        """Return the only row whose name has a prefix."""
        row: dict[str, Any]
        (row,) = (row for row in self.written["rows"] if row["name"].startswith(beginning))
        return row


Results = Callable[[str], Ended]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """``results(name)`` is the run of one command; a few run concurrently, since they wait part of the time."""
    folder = tmp_path_factory.mktemp("results")
    running: list[subprocess.Popen[str]] = []
    # A copy: pytest sets a variable for each test, and an execve(2) of another thread must not read the environment meanwhile.
    # Without bytecode every process would compile what it imports.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def begin(name: str) -> Ended:
        words = [sys.executable, "-m", "benchmarks", name, *SMALL[name].split(), "--json", str(folder / name / "numbers.json")]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(words, cwd=ROOT, env=environ, text=True, **streams)
        running.append(process)
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return Ended(printed, json.loads((folder / name / "numbers.json").read_text()))

    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(begin, name) for name in SMALL}
        yield lambda name: runs[name].result()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # so that it ends its own servers


@pytest.mark.parametrize("name", SMALL)
def test_commands_print_rows_and_write_their_origin(results: Results, name: str) -> None:
    """Every row of the JSON is in the table with its goal, and every sample has a time; date, command and host are included."""
    run = results(name)

    assert run.written["benchmark"] == name
    assert run.written["date"] and f"benchmarks {name} " in run.written["command"]
    assert {"cores", "load", "python", "torch", "gpu", "uvloop"} <= run.written["host"].keys()
    for row in run.written["rows"]:
        line = next((line for line in run.printed.splitlines() if line.startswith(row["name"])), "")
        assert line and row["values"], f"{row['name']!r} is not in the table, or empty"
        assert row["goal"] is None or row["goal"] in line
        assert all(0 < sample["p50"] <= sample["p99"] for sample in row["samples"].values() if row["unit"] == "s")


def test_quoted_rows_are_reproducible(results: Results) -> None:
    """Figures in the documentation can be measured again by the commands next to them."""
    quoted = {
        "attach": [
            "first attach of a process, with the connection and its imports",
            "again, while held",
            "after release: 100 tensors, 1 MB",
            "publishing it, once",
        ],
        "rpc": ["ping", "direct call, 4 KiB tensor, cached", "managed call and release", "… by 64 coroutines at once"],
        "scale": ["ping with 5 idle", "5 clients killed: until all is released"],
        "recovery": ["from SIGKILL to a new worker", "… with --no-preload", "… p99 from the kill on", "memory of the broker"],
        "starts": ["a start, until the script has the model", "… until the process has ended"],
        "tiers": ["first eviction", "wake: restore", "sleep: both", "wake of 2 engines", "5 models of 8 MiB in turns"],
        "mechanisms": ["2 MiB: create", "2 MiB: open and map in another process"],
        "clients": ["2 clients, 4 KiB tensor, cached", "1 client, 4 KiB tensor, new", "2 replicas of one model (tiny)"],
        "channel": ["large: all of it", "small: a message of 2 KiB"],
    }
    for command, names in quoted.items():
        found = [row["name"] for row in results(command).written["rows"]]
        assert [name for name in names if not any(row.startswith(name) for row in found)] == [], command


def test_benchmarks_leave_nothing(results: Results) -> None:
    """Calls, killed clients, channels, killed workers and evictions with a copy leave no memory and no descriptors."""
    for name in ("… growth of shared memory", "… descriptors of client and server", "… mappings of client and server"):
        # An allocator's arena, or a thread's stack, may be added at any time; and a call that finds the chunk of another one
        # still in use writes to other pages of the pool.
        few = 4 if "mappings" in name else 16 * 4096 if "memory" in name else 0
        assert results("rpc").row(name)["values"][OURS] <= few
    assert "they held 5 leases, 5 sessions and 5 descriptors" in results("scale").printed
    for name in ("40 attaches at 40 per second", "forward pass", "… mapped libraries"):
        assert results("recovery").row(name)["values"][OURS] == 0
    assert results("channel").row("… growth of the reader's descriptors")["met"] is True
    assert results("tiers").row("bytes copied by evictions with an existing copy")["met"] is True
