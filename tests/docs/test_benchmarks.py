"""The benchmarks run: every command, small, on the host. What they measure is for a quiet machine to say."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from benchmarks import starts
from benchmarks.mechanisms import MAKING, MAPPING, Parts, Watch
from benchmarks.peers import PEERS
from benchmarks.runner import ECHO, GOALS, OURS, Report, Row, Sample, interleaved, numbers, shown
from benchmarks.servers import Process
from benchmarks.sides import PEER, missing
from tests.kit.processes import ROOT

#: The first tests wait for commands that wait for others.
pytestmark = pytest.mark.timeout(400)

#: The options of each command; the one that waits most begins first.
SMALL = {
    "recovery": "--device cpu --shape tiny --attaches 40 --rate 40 --kills 2 --restarts 1 --pace 1",
    "attach": "--device cpu --shape tiny --fresh 1 --repeats 2 --rounds 1 --tensors 2,100 --megabytes 1,2",
    "rpc": "--rounds 2 --calls 5 --processes 1 --megabytes 1 --kept 50 --tasks 20 --clients 2 --long-run 50 --peers",
    "mechanisms": "--megabytes 2 --rounds 2 --calls 3",
    "channel": "--device cpu --megabytes 8 --slot 2 --rounds 2 --syncs 50",
    "records": "--device cpu --megabytes 8 --rounds 2",
    "tiers": "--megabytes 32 --rounds 2 --models 5 --engines 1,2",
    "starts": "--device cpu --shape tiny --starts 1",
    "clients": "--device cpu --clients 1,2 --replicas 2 --shape tiny --rounds 1",
    "scale": "--idle 0,5 --rounds 1 --calls 5 --clients 1 --killed 5 --patience 0.3 --shape tiny",
}


@dataclass
class Run:
    """What a command printed, and what it wrote."""

    printed: str
    written: dict[str, Any]

    def row(self, beginning: str) -> dict[str, Any]:
        """The only row whose name begins so."""
        row: dict[str, Any]
        (row,) = (row for row in self.written["rows"] if row["name"].startswith(beginning))
        return row


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    """``results(name)`` is the run of one command; a few run at once, for some of their time they wait."""
    folder = tmp_path_factory.mktemp("results")
    running: list[subprocess.Popen[str]] = []

    def begin(name: str) -> Run:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks", name, *SMALL[name].split(), "--json", str(folder / name / "numbers.json")],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return Run(printed, json.loads((folder / name / "numbers.json").read_text()))

    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(begin, name) for name in SMALL}
        yield lambda name: runs[name].result()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # so that it ends its own servers


@pytest.mark.parametrize("name", SMALL)
def test_a_command_prints_its_rows_and_writes_where_they_come_from(results: Callable[[str], Run], name: str) -> None:
    """Every row of the JSON is in the table, with its goal; date, command and host are told."""
    run = results(name)

    assert run.written["benchmark"] == name
    assert run.written["date"] and f"benchmarks {name} " in run.written["command"]
    assert {"cores", "load", "python", "torch", "gpu", "driver", "uvloop"} <= run.written["host"].keys()
    assert "numbers.json" in run.printed
    for row in run.written["rows"]:
        line = next((line for line in run.printed.splitlines() if line.startswith(row["name"])), "")
        assert line, f"{row['name']!r} is not in the table"
        assert row["goal"] is None or row["goal"] in line


def test_a_channel_carries_all_of_it(results: Callable[[str], Run]) -> None:
    """Large messages are timed beside two copies; small ones leave no descriptor and no mapping."""
    run = results("channel")

    assert {name: sample["n"] for name, sample in run.row("large")["samples"].items()} == {"shared_rpc": 2, "two copies": 2}
    assert run.row("… the reader's descriptors")["met"] is True


def test_records_go_to_disk_and_back(results: Callable[[str], Run]) -> None:
    """Each way is timed, as often as it was asked for; the file is as large as the module."""
    run = results("records")

    ways = [run.row(name) for name in ("build", "export", "import from", "attach", "adopt", "promote")]
    assert [row["samples"]["shared_rpc"]["n"] for row in ways] == [2] * 6
    assert run.row("import, as a part of the build")["unit"] == "ratio"
    assert any(note.startswith("the file has 8,") for note in run.written["notes"])


def test_models_that_sleep_wake_with_their_bits(results: Callable[[str], Run]) -> None:
    """Each step is timed, beside a plain copy; evictions with a copy copy nothing; engines that sleep have one copy."""
    run = results("tiers")

    rows = [run.row(name) for name in ("first eviction", "evict, the copy", "wake: restore", "… the first one")]
    assert [row["samples"]["shared_rpc"]["n"] for row in rows] == [1, 2, 2, 2]
    assert {"plain copy", "shared_rpc"} <= rows[2]["values"].keys()
    assert run.row("a pass after each wake")["texts"] == run.row("… with the bits of before")["texts"] == {"shared_rpc": "yes"}
    assert run.row("a later eviction of")["samples"]["shared_rpc"]["n"] == 2
    assert run.row("… with what was written since")["texts"] == {"shared_rpc": "yes"}
    assert "evictions with a copy copied 0 bytes in all" in run.printed
    assert run.row("… what a process adds")["met"] is True


def test_attach_tells_times_and_memory(results: Callable[[str], Run]) -> None:
    """First, held and released attaches with their percentiles, the load beside them, and memory on both sides."""
    run = results("attach")

    first, held, released = (run.row(name) for name in ("first attach", "again, while held", "again, after release"))
    assert [row["samples"][OURS]["n"] for row in (first, held, released)] == [1, 2, 2]
    assert all(0 < sample["p50"] <= sample["p99"] for sample in released["samples"].values())
    assert run.row("for comparison: loading it again")["values"][OURS] > 0
    assert run.row("host memory a client adds")["values"].keys() == {OURS}
    assert run.row("memory that publishing adds")["met"] is True


def test_attach_sweeps_over_tensors_and_bytes(results: Callable[[str], Run]) -> None:
    """Both sweeps are there; a goal per tensor is held against modules whose tensors outweigh the call."""
    run = results("attach")

    few, many = run.row("after release: 2 tensors"), run.row("after release: 100 tensors, 0.41 MB")
    assert (few["tensors"], few["met"]) == (2, None)
    assert many["measured"] == pytest.approx(many["values"][OURS] / 100)
    assert run.row("after release: 100 tensors, 2 MB")["nbytes"] == 2_000_000
    assert run.row("the most bytes over the fewest")["met"] is not None


def test_the_goals_of_a_large_model_on_a_gpu_are_not_held_against_a_small_one(results: Callable[[str], Run]) -> None:
    """They are printed, and judged where they apply."""
    first = results("attach").row("first attach")

    assert (first["goal"], first["met"]) == ("≤ 8 ms (16 GB, GPU)", None)


def test_rpc_compares_with_the_raw_echo_of_its_own_turns(results: Callable[[str], Run]) -> None:
    """Every row over the socket has an echo beside it; the ping is judged by the ratio."""
    run = results("rpc")

    ping = run.row("ping, p50")
    assert ping["measured"] == ping["ratios"][f"{OURS} / {ECHO}"]
    assert len(ping["samples"][OURS]["p50_of_rounds"]) == 2
    for name in (
        "direct call, 4 KiB tensor, cached",
        "direct call, 4 KiB tensor, new",
        "the same by an async def endpoint",
        "direct call, takes and returns 4 KiB, new",
        "managed call and release",
        "echo of a",
    ):
        assert {ECHO, OURS} <= run.row(name)["samples"].keys()


def test_rpc_has_other_ways_to_call_in_the_same_turns(results: Callable[[str], Run]) -> None:
    """Those that are installed; torch brings two. The others are named below the table."""
    run = results("rpc")

    for name in ("ping, p50", "direct call, 4 KiB tensor, new", "direct call, takes and returns 4 KiB", "echo of a"):
        assert {"multiprocessing", "torch RPC", OURS} <= run.row(name)["samples"].keys()
    named = " ".join([*run.row("ping, p50")["samples"], *run.written["notes"]])
    assert all(peer.name in named for peer in PEERS.values())


def test_rpc_counts_the_calls_of_processes_that_call_at_once(results: Callable[[str], Run]) -> None:
    """Every process gets some done, if not in every turn; without a peer there is no ratio to judge."""
    run = results("rpc")

    for text in ("cached", "new", "new, async def"):
        row = run.row(f"2 processes, 4 KiB tensor, {text}: calls/s")
        turns = row["calls"][OURS]
        assert len(turns) == 2 and all(sum(counts) > 0 for counts in zip(*turns, strict=True))
        assert row["values"].keys() == {OURS} and row["met"] is None


def test_rpc_finds_everything_as_it_was_after_a_long_run(results: Callable[[str], Run]) -> None:
    """Shared memory, descriptors and mappings, of the client and of the server: nothing for each of 50 calls."""
    run = results("rpc")

    assert run.row("50 calls, 4 KiB there and back: a call")["values"][OURS] > 0
    for name in ("… shared memory", "… descriptors of client, server", "… mappings of client, server"):
        row = run.row(name)
        assert row["before"].keys() == row["after"].keys()
        # An allocator's arena, or the stack of a thread, may come at any time; and a call that finds the chunk of another one
        # still in use writes to other pages of the pool.
        few = 4 if "mappings" in name else 16 * 4096 if "memory" in name else 0
        assert row["measured"] <= few, (row["before"], row["after"])


def test_rpc_times_the_import_and_the_command_line(results: Callable[[str], Run]) -> None:
    """As processes of their own; both have goals that hold on any machine."""
    run = results("rpc")

    assert run.row("import of every public name")["met"] is not None
    assert run.row("shared-rpc ls")["met"] is not None


def test_shared_tensor_takes_part_or_is_noted_as_left_out(results: Callable[[str], Run]) -> None:
    """A machine without the package, or without a GPU, gets a shorter table and a line that says why."""
    run = results("rpc")
    left_out = [note for note in run.written["notes"] if note.startswith("shared-tensor") and "left out" in note]

    assert (PEER in run.row("ping, p50")["values"]) == (missing() is None)
    assert PEER not in run.row("direct call, 4 KiB tensor, cached")["values"]
    assert len(left_out) == 1 and left_out[0] in run.printed


def test_recovery_finds_every_attach_well(results: Callable[[str], Run]) -> None:
    """Before and after the kill; what the dead worker built computes the same, and the broker has nothing of torch."""
    run = results("recovery")
    failed = run.row("40 attaches at 40 a second")
    assert (failed["values"]["shared_rpc"], failed["errors"]) == (0, [])
    assert [before + after for before, after in zip(failed["before"], failed["after"], strict=True)] == [40, 40]
    assert min(failed["before"] + failed["after"]) > 0
    assert run.row("forward pass")["met"]
    assert run.row("… libraries")["met"]
    assert run.row("from SIGKILL")["values"]["shared_rpc"] > 0


def test_starts_has_python_beside_run(results: Callable[[str], Run]) -> None:
    """Both have the model in hand before they end; what is judged is beyond an interpreter that does nothing."""
    run = results("starts")
    hand, end = run.row("a start, until the model"), run.row("… until the process")
    assert hand["values"].keys() == end["values"].keys() == {"python", "shared-rpc run"}
    assert all(0 < hand["values"][way] < end["values"][way] for way in hand["values"])
    nothing = run.row("python -c")["values"]["python"]
    assert hand["measured"] == pytest.approx(hand["values"]["shared-rpc run"] - nothing)
    assert run.row("memory of the zygote")["values"]["shared-rpc run"] > 1 << 20


def test_starts_where_no_zygote_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its memory is left out, and a note says so."""
    client = SimpleNamespace(get_server_info=lambda: {"nbytes": 5})
    monkeypatch.setattr(starts, "Client", lambda *_, **__: contextlib.nullcontext(client))
    report = Report("starts", "", [starts.RUN])
    starts._memory_rows(report, str(tmp_path / "s"), "cpu")
    assert [row.values for row in report.rows] == [{starts.RUN: 5.0}]
    assert report.notes[0].startswith("No zygote could be used")


def test_clients_counts_calls_for_each_number_of_processes(results: Callable[[str], Run]) -> None:
    """Three endpoints, each with one process and with two; and passes of two replicas."""
    *rows, replicas = results("clients").written["rows"]

    assert [(row["endpoint"], row["processes"]) for row in rows] == [
        (endpoint, count) for count in (1, 2) for endpoint in ("small", "fresh", "fresh_on_loop")
    ]
    assert replicas["processes"] == 2
    assert all(row["values"][OURS] > 0 for row in (*rows, replicas))


def test_scale_asks_beside_idle_connections(results: Callable[[str], Run]) -> None:
    """A row for each number of idle connections, judged by the first of them."""
    run = results("scale")

    none, some = run.row("ping, p50, beside 0 idle"), run.row("ping, p50, beside 5 idle")
    assert none["met"] is None
    assert some["measured"] == pytest.approx(some["values"][OURS] / none["values"][OURS])


def test_mechanisms_of_the_host_are_timed_and_outlive_their_maker(results: Callable[[str], Run]) -> None:
    """Every step has a row, with a dash for those that a memfd has not; a killed maker changes nothing, and a write to what is
    for reading ends its process.
    """
    run = results("mechanisms")

    for step in ("create", "map in the process", "map in another", "wait for the device"):
        assert run.row(f"2 MiB: {step}")["samples"]["memfd"]["n"] == 2
    for step in ("export", "open"):
        row = run.row(f"2 MiB: {step}")
        assert (row["values"], row["texts"]) == ({}, {"memfd": "-"})
    assert run.row("a kernel, a copy of 4 KiB")["samples"]["memfd"]["n"] == 3
    assert run.row("a write to what was mapped for reading")["texts"]["memfd"] == "its process ends"
    assert run.row("maker killed: who has it mapped")["texts"]["memfd"] == "reads all bytes"
    assert run.row("maker killed: a new process opens it")["texts"]["memfd"] == "yes"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_mechanisms_of_a_gpu_that_is_not_there_are_noted_as_left_out(results: Callable[[str], Run]) -> None:
    """A machine without one gets the column of the host."""
    run = results("mechanisms")

    notes = [note for note in run.written["notes"] if "left out" in note]
    assert [note.split()[0] for note in notes] == ["vmm", "ipc", "pool"]
    assert all("no GPU" in note for note in notes)


@pytest.mark.skipif(missing() is not None, reason="shared-tensor is not installed")
def test_scale_shows_that_shared_tensor_answers_nobody_beside_four_idle_connections(results: Callable[[str], Run]) -> None:
    """It is no number, so it is a text."""
    row = results("scale").row("shared-tensor beside 4 idle ones")

    assert (row["answered"], row["texts"]) == (False, {PEER: "no answer in 0.3 s"})


def test_scale_kills_clients_and_finds_everything_back(results: Callable[[str], Run]) -> None:
    """Leases, sessions and descriptors rise with the clients and fall with them; an invalidated model goes too."""
    run = results("scale")

    for key in ("leases", "sessions", "fds"):
        row = run.row(f"5 clients killed: {key}")
        assert row["during"][key] == row["before"][key] + 5
        assert (row["after"][key], row["met"]) == (row["before"][key], True)
    gone = run.row("5 clients killed, model invalidated")
    assert gone["during"]["shared"] > gone["after"]["shared"] == 0


class Sender:
    """What exports memory, as slow as a test wants it."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def export(self, seconds: float) -> str:
        """Take that long."""
        self.clock[0] += seconds
        return "exported"


def test_an_operation_is_timed_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes time inside the calls that are watched is one step, however many they are; all else is the other."""
    clock = [0.0]
    monkeypatch.setitem(sys.modules, "a_driver", SimpleNamespace(sender=Sender(clock)))
    driver: Any = sys.modules["a_driver"]
    watch = Watch(Parts("create", "export", ("a_driver:sender.export",)), lambda: clock[0])
    times: dict[str, list[float]] = {}

    def create() -> None:
        clock[0] += 5
        assert driver.sender.export(2) == "exported"
        driver.sender.export(seconds=1)

    watch.time(create, times)
    watch.time(lambda: driver.sender.export(4), times)
    assert times == {"create": [5.0, 0.0], "export": [3.0, 4.0]}


@pytest.mark.parametrize("parts", [*MAKING.values(), *MAPPING.values()], ids=str)
def test_the_steps_are_those_of_the_library(parts: Parts) -> None:
    """What is watched in the library is there; the driver's functions are looked for where its bindings are."""
    for target in parts.targets:
        module, _, path = target.partition(":")
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(module)))


def test_turns_are_taken_one_after_the_other() -> None:
    """A B A B, so that whatever slows the machine slows both."""
    turns: list[str] = []
    actions = {name: lambda name=name: turns.append(name) for name in "AB"}

    samples = interleaved(actions, rounds=2, calls=3, warm_up=1)

    assert "".join(turns) == "AAAABBBBAAAABBBB"
    assert [len(times) for times in samples["A"].rounds] == [3, 3]


def test_percentiles_are_over_all_turns() -> None:
    """And the median of each turn is kept, to tell how steady the machine was."""
    sample = Sample([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])

    assert sample.as_json() == {
        "n": 6,
        "min": 1.0,
        "p50": 6.5,
        "p90": 30.0,
        "p99": 30.0,
        "max": 30.0,
        "p50_of_rounds": [2.0, 20.0],
    }


def test_a_goal_is_met_up_to_its_limit() -> None:
    """At most, less than, or at least, as its text says."""
    assert [GOALS["ping"].met(ratio) for ratio in (1.9, 2.0, 2.1)] == [True, True, False]
    assert [GOALS["client_memory"].met(nbytes) for nbytes in (0, 4 << 20)] == [True, False]
    assert [GOALS["throughput"].met(ratio) for ratio in (3.9, 4.0, 40.0)] == [False, True, True]


def test_a_row_without_a_judgement_meets_and_misses_nothing() -> None:
    """Its goal is about something else than what was measured."""
    row = Row("attach", {OURS: 1.0}, goal=GOALS["attach_first"])

    assert (row.met, row.measured()) == (None, "")
    assert Row("attach", {OURS: 1.0}, goal=GOALS["attach_first"], judged=1.0).met is False


def test_a_cell_tells_the_ratio_to_the_raw_echo() -> None:
    """Of the same row."""
    row = Row("ping", {ECHO: 20e-6, OURS: 50e-6})

    assert (row.cell(ECHO), row.cell(OURS), row.cell(PEER)) == ("20 µs", "50 µs (2.5 x)", "")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.5 s"),
        (2.34e-3, "s", "2.34 ms"),
        (16e-6, "s", "16 µs"),
        (3 << 20, "bytes", "3.0 MiB"),
        (12, "bytes", "12 B"),
        (1.456, "ratio", "1.46 x"),
        (200, "number", "200"),
    ],
)
def test_numbers_are_shown_in_the_unit_that_suits_them(value: float, unit: Any, text: str) -> None:
    """Seconds, bytes, ratios and counts."""
    assert shown(value, unit) == text


def test_another_release_of_shared_tensor_takes_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The goals name one release; both versions are in the note."""
    (tmp_path / "shared_tensor-0.3.0.dist-info").mkdir()
    (tmp_path / "shared_tensor-0.3.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: shared-tensor\nVersion: 0.3.0\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    assert missing() == "shared-tensor 0.3.0 is installed, not the 0.2.16 of the goals, and was left out"


def test_a_missing_shared_tensor_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the dependencies that it names and does not need."""
    monkeypatch.setattr(sys, "path", [])

    assert "pip install --no-deps shared-tensor==0.2.16" in str(missing())


def test_a_process_that_ends_instead_of_answering_is_named() -> None:
    """With its exit code; what it wrote to standard error stands above."""
    with (
        Process("sides:EchoServer", os.sched_getaffinity(0), address="/nowhere/at/all.sock") as process,
        pytest.raises(RuntimeError, match=r"benchmarks\.sides:EchoServer \(pid \d+\) ended with exit code 1"),
    ):
        process.ready()


def test_numbers_that_are_none_are_refused_with_what_is_expected() -> None:
    """Before anything is started."""
    with pytest.raises(typer.BadParameter, match=r"'many'.*10,100"):
        numbers("many")
